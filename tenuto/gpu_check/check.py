"""Measure everything Tenuto wants to know of a GPU: the catalogue's models, pairs, and what CUDA MPS really does.

Run by `scripts/gpu_check`. Each step ends within ten minutes and its results are on disk when it does; what is there
already is not measured again, so that a stopped run continues. Exit code 3 where there is no usable GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tenuto.errors import EnvironmentFaultError, TenutoError
from tenuto.gpu_check.sharing import ProbeProcess, Result, StartProbe, sharing_experiments
from tenuto.gpu_check.streaming import VARIANTS
from tenuto.profiles.networks.catalogue import CATALOGUE

if TYPE_CHECKING:
    from tenuto.mps.daemon import PrivateDaemon
    from tenuto.mps.inventory import GpuDevice

__all__ = ["main", "sharing_page"]

STEP_LIMIT_S = 540.0
BATCH_SIZES = "1,2,4,8,16,32,64,128"
SHARES = "10,20,30,40,50,60,70,80,90,100"

Run = Callable[[Sequence[str], Mapping[str, str]], int]


def main(
    arguments: Sequence[str] | None = None, *, run: Run | None = None, start_probe: StartProbe = ProbeProcess
) -> int:
    """Run the steps asked for; returns the exit code."""
    parser = argparse.ArgumentParser(prog="scripts/gpu_check", description=__doc__)
    parser.add_argument("-o", "--output", default="gpu-check", help="folder of the results (default: %(default)s)")
    parser.add_argument("--steps", default="", help="comma-separated names or prefixes; default all. --list shows them")
    parser.add_argument("--list", action="store_true", help="list the steps and leave")
    parser.add_argument("--gpu", help="UUID of the GPU; default the first")
    parser.add_argument("--quick", action="store_true", help="batches 1 and 8, shares 50 and 100, two models")
    given = parser.parse_args(arguments)
    steps = _steps(given.quick)
    if given.list:
        print("\n".join(steps))
        return 0
    wanted = [part.strip() for part in given.steps.split(",") if part.strip()]
    chosen = [name for name in steps if not wanted or any(name.startswith(part) for part in wanted)]
    if not chosen:
        print(f"error: no step begins with {given.steps!r}. Use --list.", file=sys.stderr)
        return 2
    try:
        device = _device(given.gpu)
    except TenutoError as error:
        print(f"no GPU to check: {error}", file=sys.stderr)
        return 3
    folder = Path(given.output)
    folder.mkdir(parents=True, exist_ok=True)
    _write_json(folder / "inventory.json", {**vars(device), "date": datetime.now(UTC).isoformat(timespec="seconds")})
    failed = []
    with _daemon(device) as (daemon, obstacle):
        if obstacle is not None:
            print(f"without CUDA MPS: {obstacle}", file=sys.stderr)
        for name in chosen:
            print(f"step {name}", file=sys.stderr, flush=True)
            if name == "sharing":
                _sharing(device, daemon, obstacle, folder, start_probe)
                if daemon is not None and (lost := _renew(daemon)) is not None:
                    _log(folder, f"CUDA MPS is not used any more: {lost}")
                    daemon = None
            elif name == "streaming":
                if _streaming(steps[name], device, daemon is not None, folder, run or _run) != 0:
                    failed.append(name)
            elif _measure(name, steps[name], device, daemon is not None, folder, run or _run) != 0:
                failed.append(name)
    if failed:
        print(f"steps that failed: {', '.join(failed)}; their reasons are in {folder / 'log.txt'}", file=sys.stderr)
    print(f"results in {folder}")
    return 1 if failed else 0


def _steps(quick: bool) -> dict[str, list[str]]:
    """Return the steps with the arguments of `tenuto profile`, or of their own program, that make them."""
    models = ["resnet50", "bert"] if quick else list(CATALOGUE)
    grid = ["--batch-sizes", "1,8" if quick else BATCH_SIZES, "--budget-s", "60"]
    shares = "50,100" if quick else SHARES
    steps = {"sharing": [""], "streaming": ["resnet50", "--batch-size", "8", "--seconds", "5" if quick else "30"]}
    steps |= {f"model-{name}": [name, *grid, "--shares", shares] for name in models}
    steps |= {
        f"igniter-{name}": [name, "--batch-sizes", "1,16,32", "--shares", "10,50,100", "--co-runs", "igniter"]
        for name in models
    }
    first = models[0]
    steps["residents"] = [first, "--batch-sizes", "1,16,32", "--shares", "10,50,100", "--co-runs", "residents"]
    for index, one in enumerate(models):
        for other in models[index + 1 :]:
            steps[f"pair-{one}-{other}"] = [
                one, other, "--batch-sizes", "1,16", "--shares", "20,50,80,100", "--co-runs", "pairs",
                "--co-run-s", "3",
            ]  # fmt: skip
    steps["fit"] = [first, "--batch-sizes", "1", "--shares", "100", "--fit"]
    return steps


def _device(uuid: str | None) -> GpuDevice:
    from tenuto.mps.inventory import read_inventory

    devices = read_inventory()
    found = next((device for device in devices if uuid in (None, device.uuid)), None)
    if found is None:
        known = ", ".join(device.uuid for device in devices) or "none"
        raise EnvironmentFaultError(f"GPU {uuid or ''} is not here. GPUs: {known}.")
    return found


@contextlib.contextmanager
def _daemon(device: GpuDevice) -> Iterator[tuple[PrivateDaemon | None, str | None]]:
    """Start a private CUDA MPS daemon, or say why there is none; at the end it is left and stops by itself."""
    from tenuto.mps.daemon import PrivateDaemon

    if device.is_mig or device.compute_capability < (7, 0):
        yield None, "MIG is on" if device.is_mig else "shares need a GPU of compute capability 7.0 or later"
        return
    daemon = PrivateDaemon(device.uuid)
    try:
        daemon.join()
    except EnvironmentFaultError as error:
        yield None, str(error)
        return
    try:
        yield daemon, None
    finally:
        daemon.leave()


def _renew(daemon: PrivateDaemon) -> str | None:
    """Start the daemon again if killed clients and a fault have left it unable to serve; returns why it cannot be."""
    try:
        if daemon.status() in (None, "ACTIVE"):
            return None
    except EnvironmentFaultError:
        pass
    try:
        daemon.leave()
        daemon.stop_if_unused()
        daemon.join()
        return None if (status := daemon.status()) in (None, "ACTIVE") else f"the server stays {status}"
    except EnvironmentFaultError as error:
        return str(error)


def _measure(
    name: str, arguments: list[str], device: GpuDevice, shared: bool, folder: Path, run: Run
) -> int:
    """Run one `tenuto profile`; without CUDA MPS on the whole GPU only, and no co-runs."""
    if not shared:
        if not name.startswith(("model-", "fit")):
            _log(folder, f"{name}: left out, as CUDA MPS does not run")
            return 0
        arguments = [*arguments[: arguments.index("--shares")], "--shares", "100",
                     *arguments[arguments.index("--shares") + 2 :]]  # fmt: skip
    command = [
        sys.executable, "-c", "from tenuto.cli import main; main()", "profile", *arguments, "--device", "cuda",
        "--time-limit-s", f"{STEP_LIMIT_S:g}", "--resume", "-o", str(folder / f"profile-{device.type}.yaml"),
    ]  # fmt: skip
    code = run(command, _environment(device, shared=shared))
    _log(folder, f"{name}: exit code {code}")
    return code


def _streaming(arguments: list[str], device: GpuDevice, shared: bool, folder: Path, run: Run) -> int:
    """Measure streaming against plain batches, unless that was done before."""
    output = folder / "streaming.json"
    if output.exists() and (written := json.loads(output.read_text(encoding="utf-8"))).keys() >= set(VARIANTS) and all(
        "failed" not in written[name] for name in VARIANTS
    ):
        return 0
    command = [sys.executable, "-m", "tenuto.gpu_check.streaming", *arguments, "-o", str(output)]
    code = run(command, _environment(device, shared=shared))
    _log(folder, f"streaming: exit code {code}")
    return code


def _environment(device: GpuDevice, *, shared: bool) -> dict[str, str]:
    """Return the environment of a process on this GPU, a client of CUDA MPS or not."""
    from tenuto.mps.share import client_environment

    own = client_environment(device.uuid, None, None) if shared else {"CUDA_VISIBLE_DEVICES": device.uuid}
    return {**os.environ, **own}


def _run(command: Sequence[str], environment: Mapping[str, str], limit_s: float = STEP_LIMIT_S + 30) -> int:
    """Run one step; past its limit it is asked to stop, as a client killed at work may take the CUDA MPS server with
    it, and only then killed with everything it started."""
    with subprocess.Popen(command, env=dict(environment), start_new_session=True) as step:
        try:
            return step.wait(limit_s)
        except (subprocess.TimeoutExpired, KeyboardInterrupt) as stop:
            step.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                step.wait(25.0)
            if isinstance(stop, KeyboardInterrupt):
                raise
            return 124
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(step.pid, signal.SIGKILL)


def _sharing(
    device: GpuDevice, daemon: PrivateDaemon | None, obstacle: str | None, folder: Path, start_probe: StartProbe
) -> None:
    results = _kept(folder / "sharing.json")

    def report(name: str, result: Result) -> None:
        results[name] = result
        _write_json(folder / "sharing.json", results)
        (folder / "sharing.md").write_text(sharing_page(device, results), encoding="utf-8")

    if daemon is None:
        report("CUDA MPS", {"failed": obstacle})
        return

    from tenuto.mps.share import client_environment

    def environment(share_pct: float | None, memory_mib: float | None) -> Mapping[str, str]:
        made = client_environment(device.uuid, share_pct, None)
        if memory_mib is not None:
            made["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] = f"0={memory_mib:.0f}M"  # the client sees one GPU
        return made

    sharing_experiments(
        daemon, environment, device.sm_count, report, start=start_probe, limit_s=STEP_LIMIT_S - 120.0,
        done=tuple(results),
    )  # fmt: skip


def _kept(path: Path) -> dict[str, Result]:
    """Return the experiments of an earlier run that came to a result."""
    try:
        found: dict[str, Result] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return {name: result for name, result in found.items() if "failed" not in result}


def sharing_page(device: GpuDevice, results: Mapping[str, Result]) -> str:
    """Return the page of what CUDA MPS did, every line as observed."""
    lines = [
        f"# What CUDA MPS did on {device.name}", "",
        f"{device.name}, {device.sm_count} SMs, driver {device.driver}, compute mode "
        f"{device.compute_mode}; observed {datetime.now(UTC).date().isoformat()} by `scripts/gpu_check`.", "",
    ]  # fmt: skip
    shares = {name: result for name, result in results.items() if name.startswith("share ") and "failed" not in result}
    if shares:
        lines += ["| share | SMs seen | share of the SMs | at or below | client |", "|---|---|---|---|---|"]
        lines += [
            f"| {name.removeprefix('share ')} | {r['sm_count']} | {r['share_of_sms']} | "
            f"{'yes' if r['at_or_below'] else 'NO'} | {'yes' if r['listed_as_client'] else 'NO'} |"
            for name, r in shares.items()
        ]
        lines.append("")
    for name, result in results.items():
        if name not in shares:
            lines += [f"## {name[:1].upper()}{name[1:]}", ""]
            lines += [*(f"- {key.replace('_', ' ')}: {value}" for key, value in result.items()), ""]
    return "\n".join(lines)


def _log(folder: Path, line: str) -> None:
    with (folder / "log.txt").open("a", encoding="utf-8") as file:
        file.write(f"{datetime.now(UTC).isoformat(timespec='seconds')} {line}\n")


def _write_json(path: Path, data: Any) -> None:
    path.write_text(json.dumps(data, indent=2, default=str) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
