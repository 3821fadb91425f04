"""What becomes of open streams when something ends, on a real `tenuto serve` with a Ray of its own and emulated GPUs.

    python lab/benchmarks/walk_streams.py [--only end,drain,kill] [--streams 50] [--tokens 600] [--step-ms 50]

Each case opens streams, waits until all write, and then does one thing: SIGTERM to `tenuto serve`, `tenuto drain`, a
plan that starts gpu-lets anew, `kill -9` or SIGSTOP of a process. The letters of an emulated answer follow each other
in the alphabet, so that a token that is lost or sent twice shows. Only processes that descend from this one are killed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from bench_operating import pids_of, until
from scenes import print_machine

from tenuto.deployments.serve.deployment import Deployment
from tenuto.deployments.serve.endpoint import get_json
from tenuto.errors import EnvironmentFaultError
from tenuto.placement import Plan
from tenuto.profiles import Profile, StepCost

PORT = 27100
TENUTO = Path(sys.executable).parent / "tenuto"


def profile_of(step_ms: float) -> Profile:
    """Return the profile of the model, whose steps take the same time on any share."""
    steps = [
        {**StepCost.line(step_ms, 0.0, 0.0, 0.0, 0.0).model_dump(mode="json"), "share_pct": share}
        for share in (20, 100)
    ]
    row = {"weights_mib": 1000, "generation": {"kv_bytes_per_token": 1000, "steps": steps}}
    return Profile.model_validate({"name": "walk", "gpu_type": "a100", "source": "made up", "models": {"m": row}})


def make_plan(step_ms: float, shares: Mapping[str, float], memory_mib: float | None = None) -> Plan:
    """Return a plan with a gpu-let of the model for each id, which names its GPU, on this share of it."""
    cost = StepCost.line(step_ms, 0.0, 0.0, 0.0, 0.0).model_dump(mode="json")
    replica = {"batch_size": 64, "kv_tokens": 1 << 20, "steps": cost}
    slo = {"ttft_ms": 60_000, "tpot_ms": 10_000}
    lengths = {"prompt_tokens": 32, "output_tokens": 100, "max_sequences": 64}
    return Plan.from_data(
        {
            "policy": {"name": "none"},
            "gpus": [{"id": f"n0/{gpu}", "type": "a100"} for gpu in (0, 1)],
            "gpulets": [
                {
                    "id": each,
                    "gpu": each.rpartition("/")[0],
                    "share_pct": share,
                    "memory_mib": memory_mib,
                    "models": [{"name": "m", **replica}],
                }
                for each, share in shares.items()
            ],
            "models": [
                {"name": "m", "rate_rps": 5, "slo": slo, "generates": lengths, "options": {"tokenizer": "bytes"}}
            ],
        }
    )


class Stream:
    """One stream: when its tokens came, and how it ended."""

    def __init__(self) -> None:
        self.came: list[float] = []
        self.end = ""
        self.ended_s = 0.0
        self.faults = 0  # tokens that are lost or came twice
        self._last = ""

    async def run(self, number: int, tokens: int) -> None:
        """Ask, and read to the end."""
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", PORT, limit=1 << 20)
            asked = {"model": "m", "prompt": f"stream {number:5d}", "max_tokens": tokens, "stream": True}
            body = json.dumps(asked).encode()
            head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body)
            writer.write(head + body)
            status = await reader.readline()
            if b" 200 " not in status:
                self.end = status.decode().strip() + " " + (await reader.read(2000)).decode().rpartition("\r\n")[2]
            while not self.end:
                line = await reader.readline()
                if not line:
                    self.end = "broken"
                elif line.startswith(b"data: {"):
                    self._take(json.loads(line[6:]))
        except OSError as error:
            self.end = f"broken: {error}"
        self.ended_s = time.monotonic()

    def _take(self, event: dict) -> None:
        if "error" in event:
            self.end = f"error: {event['error']['message']}"
            return
        choice = event["choices"][0]
        for letter in choice["text"]:
            self.came.append(time.monotonic())
            if self._last and ord(letter) != (ord(self._last) - 96) % 26 + 97:
                self.faults += 1
            self._last = letter
        if choice["finish_reason"] is not None:
            self.end = choice["finish_reason"]


class Streams:
    """Open streams, read by a thread of their own."""

    def __init__(self, count: int, tokens: int) -> None:
        self.all = [Stream() for _ in range(count)]
        self._tokens = tokens
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)
        self._thread.start()
        until(lambda: all(len(each.came) > 10 or each.end for each in self.all))

    async def _run(self) -> None:
        await asyncio.gather(*(each.run(number, self._tokens) for number, each in enumerate(self.all)))

    def report(self, what: str, since_s: float, note: str = "") -> None:
        """Wait for all, and print what became of them."""
        self._thread.join(300.0)
        ends = Counter(each.end[:230] for each in self.all)
        pauses = [
            max((b - a for a, b in zip(each.came, each.came[1:], strict=False) if b > since_s), default=0.0)
            for each in self.all
        ]
        last_s = max(each.ended_s for each in self.all) - since_s
        faults = sum(each.faults for each in self.all)
        short = sum(each.end == "length" and len(each.came) != self._tokens for each in self.all)
        print(
            f"{what}: {dict(ends)}; last after {last_s:.1f} s; longest pause {max(pauses):.1f} s; {faults} tokens lost "
            f"or twice, {short} too short{note}",
            flush=True,
        )


@contextmanager
def serving(plan: Plan, folder: Path, *more: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run `tenuto serve` with this plan."""
    file = folder / "plan.yaml"
    file.write_text(json.dumps(Deployment(plan=plan).config().to_data()))
    process = subprocess.Popen(
        [str(TENUTO), "serve", str(file), "--emulate", "--port", str(PORT), "--address", "local", *more],
        env={**os.environ, "RAY_TMPDIR": str(folder)},
        stderr=(folder / "log").open("ab"),
    )
    try:
        before, log = len((folder / "log").read_text()), folder / "log"
        took_s = until(lambda: "Ctrl-C drains" in log.read_text()[before:])
        if not ready():
            raise SystemExit(log.read_text())
        print(f"ready after {took_s:.0f} s", file=sys.stderr, flush=True)
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(90.0)
        if process.poll() is None:
            process.kill()


def ready() -> bool:
    try:
        return bool(get_json(f"http://127.0.0.1:{PORT}/v2/health/ready", 1.0).get("ready"))
    except EnvironmentFaultError:
        return False


def told(folder: Path, *words: str) -> str:
    """Run a command of ours, and say how it ended."""
    environment, began = {**os.environ, "RAY_TMPDIR": str(folder)}, time.monotonic()
    done = subprocess.run(
        [str(TENUTO), *words], env=environment, capture_output=True, text=True, timeout=300.0, check=False
    )
    last = done.stderr.strip().splitlines()[-1]
    return f"; {words[0]}: {done.returncode} after {time.monotonic() - began:.1f} s: {last}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose names begin with one of these words")
    parser.add_argument("--streams", type=int, default=50)
    parser.add_argument("--tokens", type=int, default=600)
    parser.add_argument("--step-ms", type=float, default=50.0)
    args = parser.parse_args()
    print_machine()
    both, one = {"n0/0/a": 50.0, "n0/1/a": 50.0}, {"n0/0/a": 50.0}
    anew, whole, other = {"n0/0/b": 40.0}, {"n0/0/a": 100.0}, {"n0/0/b": 90.0}

    def plan(shares: Mapping[str, float], memory_mib: float | None = None) -> Plan:
        return make_plan(args.step_ms, shares, memory_mib)

    def wanted(name: str) -> bool:
        return any(name.startswith(word) for word in args.only.split(","))

    def stopped(process: subprocess.Popen[bytes]) -> str:
        process.send_signal(signal.SIGTERM)
        return f"; exit code {process.wait(120.0)}"

    def drained(gpu: str) -> Callable[[object], str]:
        file = folder / "profile.yaml"
        file.write_text(profile_of(args.step_ms).dump())
        asked = "drain", gpu, "--yes", "--profiles", str(file), "--policy", "tenuto"
        return lambda _process: told(folder, *asked)

    def deployed(shares: Mapping[str, float], memory_mib: float | None = None) -> Callable[[object], str]:
        def run(_process: object) -> str:
            file = folder / "next.yaml"
            after = Deployment(plan=plan(shares, memory_mib), executor="emulated", port=PORT)
            file.write_text(json.dumps(after.config().to_data()))
            return told(folder, "deploy", str(file), "--emulate", "--yes")

        return run

    def struck(title: str, number: signal.Signals) -> Callable[[object], str]:
        def run(_process: object) -> str:
            os.kill(pids_of(title)[0], number)
            return ""

        return run

    with tempfile.TemporaryDirectory(prefix="r") as made:
        folder = Path(made)
        cases: list[tuple[str, dict[str, float], Callable[[subprocess.Popen[bytes]], str], tuple[str, ...]]] = [
            ("end", both, stopped, ()),
            ("end, two gateways", both, stopped, ("--gateways", "2")),
            ("delete", both, lambda _process: told(folder, "delete", "--yes"), ("--gateways", "2")),
            ("drain with another gpu-let", both, drained("n0/1"), ()),
            ("drain to a new gpu-let", one, drained("n0/0"), ()),
            ("change beside the old one", one, deployed(anew), ()),
            ("change without room for the share", whole, deployed(other), ()),
            ("change without memory", whole, deployed(other, 30_000), ()),
            ("kill gpu-let with another", both, struck("gpulet-n0-0-a", signal.SIGKILL), ()),
            ("kill gpu-let without another", one, struck("gpulet-n0-0-a", signal.SIGKILL), ()),
            ("kill dispatcher", both, struck("ServeReplica:dispatcher-0", signal.SIGKILL), ("--gateways", "2")),
            ("kill gateway", both, struck("ServeReplica:tenuto:gateway", signal.SIGKILL), ("--gateways", "2")),
            ("kill gateway alone", both, struck("ServeReplica:tenuto:gateway", signal.SIGKILL), ("--gateways", "1")),
            ("hang gpu-let with another", both, struck("gpulet-n0-0-a", signal.SIGSTOP), ()),
            ("hang gpu-let without another", one, struck("gpulet-n0-0-a", signal.SIGSTOP), ()),
            ("hang dispatcher", both, struck("ServeReplica:dispatcher-0", signal.SIGSTOP), ("--gateways", "2")),
            ("hang gateway", both, struck("ServeReplica:tenuto:gateway", signal.SIGSTOP), ("--gateways", "2")),
        ]
        for name, shares, event, more in cases:
            if not wanted(name):
                continue
            with serving(plan(shares, 30_000 if "memory" in name else None), folder, *more) as process:
                streams = Streams(args.streams, args.tokens)
                since_s = time.monotonic()
                streams.report(name, since_s, event(process))
        print((folder / "log").read_text(), file=sys.stderr)


if __name__ == "__main__":
    main()
