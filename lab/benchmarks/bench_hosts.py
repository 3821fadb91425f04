"""What clients notice when a host is lost: a real Ray of three hosts, each a network namespace, with emulated GPUs.

    sudo python lab/benchmarks/bench_hosts.py [--redis PROGRAM] [--only worker,head|cut] [--rps 40]

Every host has an address of its own on a bridge. Clients come from outside to the gateways of two of them.

worker: the line of a host with a gateway is cut, and then its processes are killed, so that no other host sees them
end. head: the same with the host that runs the head of Ray, whose state lies in a Redis outside. It is started again
10 s later. Before that, the dispatchers of the other hosts are killed once: the oldest dispatcher schedules, and this
puts it on the head's host. cut: four lines are cut, and nothing is killed: a worker's for 3 s, the head's for 3 s, the
one between a worker's gateway and the dispatcher that schedules for 10 s, and a worker's for a minute. When Ray has not
heard a host for half a minute, it ends itself there; then it is started again, as a supervisor would do.

Namespaces, bridge and processes are removed at the end. Needs root, `ip` of iproute2, and for head a redis-server.
"""

from __future__ import annotations

import argparse
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import yaml
from bench_operating import Load, make_plan, shown, until
from scenes import print_machine

from tenuto.deployments.process.ray_token import make_token
from tenuto.deployments.serve.launcher import RAY_ENVIRONMENT

BRIDGE, OUTSIDE = "tenutobr", "10.99.7.1"
HOSTS = {"head": "10.99.7.2", "left": "10.99.7.3", "right": "10.99.7.4"}
RAY_PORT, PORT, REDIS_PORT = 6391, 8170, 6392
MODELS = ("one", "two")
HEAD_OPTIONS = ("--head", f"--port={RAY_PORT}", "--num-gpus=0", "--include-dashboard=false")


def ip(*words: str) -> None:
    """Run a command of iproute2."""
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


class Host:
    """A network namespace with a line to the bridge, and the processes in it."""

    def __init__(self, name: str) -> None:
        self.address = HOSTS[name]
        self.namespace, self._line = f"tenuto-{name}", f"tnt-{name}"
        ip("netns", "add", self.namespace)
        ip("link", "add", self._line, "type", "veth", "peer", "name", "eth0", "netns", self.namespace)
        ip("link", "set", self._line, "master", BRIDGE, "up")
        for words in (
            ("addr", "add", f"{self.address}/24", "dev", "eth0"),
            ("link", "set", "eth0", "up"),
            ("link", "set", "lo", "up"),
        ):
            ip("-n", self.namespace, *words)

    def run(self, *command: str, check: bool = True) -> str:
        """Run a command here and return what it said."""
        words = ["ip", "netns", "exec", self.namespace, *command]
        done = subprocess.run(words, capture_output=True, text=True, timeout=240)
        if check and done.returncode:
            raise SystemExit(f"{' '.join(command)}: {done.stderr}{done.stdout}")
        return done.stderr + done.stdout

    def start_ray(self, *options: str) -> None:
        """Start Ray's processes here."""
        self.run(*self._ray(*options))

    def _ray(self, *options: str) -> list[str]:
        program = str(Path(sys.executable).parent / "ray")
        common = [f"--node-ip-address={self.address}", "--num-cpus=2", "--disable-usage-stats"]
        return [program, "start", *common, *options]

    def restart_head(self) -> None:
        """Start Ray's head here again, where it does not see the processes of the other hosts: it would take a cluster
        that they belong to for one that runs here."""
        alone = ["ip", "netns", "exec", self.namespace, "unshare", "--pid", "--fork", "--mount-proc"]
        subprocess.Popen([*alone, *self._ray(*HEAD_OPTIONS), "--block"], stdout=subprocess.DEVNULL)
        until(lambda: socket.socket().connect_ex((self.address, RAY_PORT)) == 0, 60.0)

    def cut(self) -> None:
        """Let nothing pass from here or to here any more."""
        ip("link", "set", self._line, "down")

    def part(self, other: Host) -> None:
        """Let nothing pass between here and another host: what is sent there goes to an address that nobody has."""
        for one, far in ((self, other), (other, self)):
            words = ("neigh", "replace", far.address, "lladdr", "02:00:00:00:00:01", "dev", "eth0", "nud", "permanent")
            ip("-n", one.namespace, *words)

    def mend(self) -> None:
        """Let everything pass again."""
        ip("link", "set", self._line, "up")
        ip("-n", self.namespace, "neigh", "flush", "dev", "eth0", "nud", "permanent")

    def kill(self) -> None:
        """End all processes here."""
        self.kill_those("")

    def running(self, title: str) -> int:
        """Return how many processes here have this in their title."""
        return len(self._pids_of(title))

    def _pids_of(self, title: str) -> list[str]:
        found = []
        for pid in subprocess.run(
            ["ip", "netns", "pids", self.namespace], capture_output=True, text=True
        ).stdout.split():
            with suppress(OSError):  # it has ended
                if title in Path(f"/proc/{pid}/cmdline").read_text(errors="replace"):
                    found.append(pid)
        return found

    def kill_those(self, title: str) -> int:
        """End the processes here with this in their title; return how many there were."""
        found = self._pids_of(title)
        for pid in found:
            subprocess.run(["kill", "-9", pid], capture_output=True)
        return len(found)

    def remove(self) -> None:
        """End all processes here, and the namespace."""
        self.kill()
        subprocess.run(["ip", "netns", "del", self.namespace], capture_output=True)


@contextmanager
def hosts() -> Iterator[dict[str, Host]]:
    """Make the bridge and the hosts."""
    ip("link", "add", BRIDGE, "type", "bridge")
    made: dict[str, Host] = {}
    try:
        ip("addr", "add", f"{OUTSIDE}/24", "dev", BRIDGE)
        ip("link", "set", BRIDGE, "up")
        for name in HOSTS:
            made[name] = Host(name)
        yield made
    finally:
        for host in made.values():
            host.remove()
        subprocess.run(["ip", "link", "del", BRIDGE], capture_output=True)


@contextmanager
def redis(program: str) -> Iterator[None]:
    """Start a Redis outside of the hosts."""
    command = [program, "--port", str(REDIS_PORT), "--bind", OUTSIDE, "--protected-mode", "no", "--save", ""]
    process = subprocess.Popen([*command, "--appendonly", "no"], stdout=subprocess.DEVNULL)
    os.environ["RAY_REDIS_ADDRESS"] = f"{OUTSIDE}:{REDIS_PORT}"
    try:
        time.sleep(1.0)
        yield
    finally:
        del os.environ["RAY_REDIS_ADDRESS"]
        process.kill()
        process.wait()


def deploy(made: dict[str, Host], folder: Path, rps: float) -> None:
    """Start Ray everywhere and serve two models, each on two hosts, through two front doors."""
    made["head"].start_ray(*HEAD_OPTIONS)
    for name in ("left", "right"):
        made[name].start_ray(f"--address={HOSTS['head']}:{RAY_PORT}", "--num-gpus=2")
    plan = make_plan({"n0/0/a": (50.0, list(MODELS)), "n1/0/a": (50.0, list(MODELS))}, rps / 2).to_data()
    for gpu in plan["gpus"]:
        gpu["address"] = HOSTS["left" if gpu["id"].startswith("n0") else "right"]
    (folder / "plan.yaml").write_text(yaml.safe_dump(plan))
    quiet = {"slo": False, "underused": None, "rate": None, "slow": None}
    (folder / "control.yaml").write_text(yaml.safe_dump({"mode": "act", "policy": {"name": "ffd"}, "when": quiet}))
    tenuto = str(Path(sys.executable).parent / "tenuto")
    said = made["head"].run(
        tenuto,
        "deploy",
        str(folder / "plan.yaml"),
        "--emulate",
        "--host",
        "0.0.0.0",
        "--insecure",
        "--port",
        str(PORT),
        "--gateways",
        "3",
        "--dispatchers",
        "3",
        "--control",
        str(folder / "control.yaml"),
        "--address",
        f"{HOSTS['head']}:{RAY_PORT}",
    )
    print("# " + said.strip().splitlines()[-1], flush=True)


def watch(what: str, made: dict[str, Host], lost: str, args: argparse.Namespace, back_s: float | None) -> None:
    """Lose a host under load; say what came back of what each front door was asked."""
    doors = [name for name in HOSTS if name != lost or back_s is not None]
    rates = {name: args.rps / 2 / len(doors) for name in MODELS}
    with ExitStack() as stack:
        loads = {name: stack.enter_context(Load(PORT, rates, host=HOSTS[name])) for name in doors}
        time.sleep(5.0)
        since_s = time.monotonic()
        made[lost].cut()
        made[lost].kill()
        if back_s is not None:
            time.sleep(back_s)
            made[lost].mend()
            made[lost].restart_head()
            print(f"  Ray's head is back after {time.monotonic() - since_s:.0f} s", flush=True)
        time.sleep(max(0.0, args.watch_s - (time.monotonic() - since_s)))
    for name, load in loads.items():
        if name == lost:
            continue
        before, after = load.counts(0.0, since_s), load.counts(since_s)
        bad = [at for at, _, word in load.seen if at >= since_s and word != "ok"]
        last = f"the last of them after {max(bad) - since_s:.1f} s" if bad else "none lost"
        print(f"{what}, front door on {name}: before {shown(before)}; then {shown(after)}; {last}", flush=True)


def watch_cut(made: dict[str, Host], lost: str, cut_s: float, args: argparse.Namespace, other: str = "") -> None:
    """Cut the line of a host, or only that to another one, under load for a while, kill nothing, and say what came back
    of what each front door was asked, and who is there in the end."""
    rates = {name: args.rps / 2 / len(HOSTS) for name in MODELS}
    with ExitStack() as stack:
        loads = {name: stack.enter_context(Load(PORT, rates, host=HOSTS[name])) for name in HOSTS}
        time.sleep(5.0)
        there = {name: made[name].running("ServeReplica:") for name in HOSTS}
        since_s = time.monotonic()
        if other:
            made[lost].part(made[other])
        else:
            made[lost].cut()
        time.sleep(cut_s)
        made[lost].mend()
        if other:
            made[other].mend()
        mended_s, joined = time.monotonic(), ""
        if cut_s >= 30.0 and until(lambda: made[lost].running("raylet/raylet") == 0, 30.0) < 30.0:
            made[lost].kill()
            made[lost].start_ray(f"--address={HOSTS['head']}:{RAY_PORT}", "--num-gpus=2")
            joined = f"; Ray was started there again, {time.monotonic() - mended_s:.0f} s after the mending"
        whole = until(lambda: all(made[name].running("ServeReplica:") >= there[name] for name in HOSTS), 60.0)
        joined += (
            "; not all replicas were there again" if whole >= 60.0 else f"; all replicas were there {whole:.0f} s on"
        )
        time.sleep(args.watch_s)
    what = f"{lost} cut off{f' from {other}' if other else ''} for {cut_s:g} s"
    for name, load in loads.items():
        away, back = load.counts(since_s, mended_s), load.counts(mended_s)
        bad = [at for at, _, word in load.seen if at >= since_s and word != "ok"]
        last = f"the last of them after {max(bad) - since_s:.1f} s" if bad else "none lost"
        print(f"{what}, front door on {name}: cut {shown(away)}; mended {shown(back)}; {last}", flush=True)
    print(
        f"  replicas in the end: { {name: made[name].running('ServeReplica:') for name in HOSTS} }{joined}", flush=True
    )


def main() -> None:
    """Read the arguments and do it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--redis", help="a redis-server; default: the one on PATH")
    parser.add_argument("--only", default="worker,head")
    parser.add_argument("--rps", type=float, default=40.0, help="of all models and front doors")
    parser.add_argument("--watch-s", type=float, default=40.0, help="after the loss")
    args = parser.parse_args()
    print_machine()
    os.environ.update({key: os.environ.get(key, value) for key, value in RAY_ENVIRONMENT.items()})
    os.environ.setdefault("RAY_AUTH_MODE", "token")  # on every host: `ray start --address` is without it by itself
    make_token()
    program = args.redis or shutil.which("redis-server")
    if "cut" in args.only:
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            made = stack.enter_context(hosts())
            deploy(made, folder, args.rps)
            time.sleep(10.0)
            for lost, cut_s in (("right", 3.0), ("head", 3.0)):
                watch_cut(made, lost, cut_s, args)
            for other in ("head", "right"):  # one of them has the dispatcher that schedules, unless left has
                watch_cut(made, "left", 10.0, args, other)
            watch_cut(made, "right", 60.0, args)
        return
    cases: Sequence[tuple[str, str, float | None]] = [("worker", "right", None), ("head", "head", 10.0)]
    for what, lost, back_s in cases:
        if what not in args.only:
            continue
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            made = stack.enter_context(hosts())
            if what == "head":
                if program is None:
                    print("head: no redis-server here: install one, or name it with --redis")
                    continue
                stack.enter_context(redis(program))
            deploy(made, folder, args.rps)
            until(
                lambda made=made: (
                    "200"
                    in made["head"].run(
                        "curl",
                        "-s",
                        "-o",
                        "/dev/null",
                        "-w",
                        "%{http_code}",
                        f"http://{HOSTS['left']}:{PORT}/v2/health/ready",
                        check=False,
                    )
                ),
                60.0,
            )
            if what == "head":
                killed = [made[name].kill_those("ServeReplica:dispatcher-") for name in ("left", "right")]
                print(f"  dispatchers killed elsewhere: {killed}", flush=True)
                time.sleep(15.0)
            watch(what, made, lost, args, back_s)


if __name__ == "__main__":
    main()
