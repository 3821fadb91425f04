"""Machines of a test's own: network namespaces on a bridge, each with an address. Their lines can be cut, slowed and
made to lose packets."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

__all__ = ["Machine", "machines", "why_not"]

_NOBODY = "02:00:00:00:00:01"


def why_not() -> str:
    """Return why no namespaces can be made here; "" where they can."""
    if os.geteuid() != 0:
        return "namespaces need root"
    if shutil.which("ip") is None:
        return "namespaces need `ip` of iproute2"
    probe = f"tnt{os.getpid()}"
    if subprocess.run(["ip", "netns", "add", probe], capture_output=True).returncode:
        return "this machine allows no namespaces"
    subprocess.run(["ip", "netns", "del", probe], capture_output=True)
    return ""


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, text=True)


def _at_once(*commands: str) -> None:
    """Run commands of `ip` one after another, with no pause that packets would notice."""
    subprocess.run(["ip", "-batch", "-"], input="\n".join(commands), check=True, capture_output=True, text=True)


class Machine:
    """A namespace with a line to the bridge."""

    def __init__(self, name: str, address: str, bridge: str) -> None:
        self.name, self.address = name, address
        self.namespace, self._line, self._bridge = f"{bridge}-{name}", f"{bridge}{name}", bridge
        self._carrier: subprocess.Popen[bytes] | None = None  # of what goes over a disturbed line
        _run("ip", "netns", "add", self.namespace)
        _run("ip", "link", "add", self._line, "type", "veth", "peer", "name", "eth0", "netns", self.namespace)
        _run("ip", "link", "set", self._line, "master", bridge, "up")
        for words in (
            ("addr", "add", f"{address}/24", "dev", "eth0"),
            ("link", "set", "eth0", "up"),
            ("link", "set", "lo", "up"),
        ):
            _run("ip", "-n", self.namespace, *words)

    def command(self, *words: str) -> list[str]:
        """Return the command that runs something here."""
        return ["ip", "netns", "exec", self.namespace, *words]

    def cut(self) -> None:
        """Let nothing pass from here or to here."""
        _run("ip", "link", "set", self._line, "down")

    def cut_from(self, others: Sequence[Machine]) -> None:
        """Let nothing pass to these machines; cut them from this one too for both ways."""
        for other in others:
            # What is sent there goes to an address that nobody has.
            words = ("neigh", "replace", other.address, "lladdr", _NOBODY, "dev", "eth0", "nud", "permanent")
            _run("ip", "-n", self.namespace, *words)

    def disturb(self, delay_ms: float, loss_pct: float, seed: int = 0) -> None:
        """Let what leaves here and what comes here take longer, and some of it be lost; the seed says what."""
        ends = f"{self._line}i", f"{self._line}o"
        _run("ip", "link", "add", ends[0], "up", "type", "veth", "peer", "name", ends[1])
        words = (self._line, ends[0], str(delay_ms), str(loss_pct), str(seed))
        self._carrier = subprocess.Popen(
            [sys.executable, "-m", "tests.instruments.far_line", *words], stdout=subprocess.PIPE
        )
        assert self._carrier.stdout is not None
        assert self._carrier.stdout.readline() == b"ready\n"
        _at_once(f"link set {self._line} nomaster", f"link set {ends[1]} master {self._bridge} up")

    def mend(self) -> None:
        """Let everything pass as before."""
        _run("ip", "link", "set", self._line, "up")
        _run("ip", "-n", self.namespace, "neigh", "flush", "dev", "eth0", "nud", "permanent")
        if self._carrier is not None:
            _at_once(f"link set {self._line} master {self._bridge}", f"link del {self._line}i")
            self._carrier.kill()
            self._carrier.communicate()
            self._carrier = None

    def remove(self) -> None:
        """Take it away; its processes must have ended."""
        self.mend()
        subprocess.run(["ip", "netns", "del", self.namespace], capture_output=True)


@contextmanager
def machines(*names: str) -> Iterator[dict[str, Machine]]:
    """Make machines that reach each other; their names must be short."""
    bridge = f"t{os.getpid() % 100000}"
    _run("ip", "link", "add", bridge, "type", "bridge")
    made: dict[str, Machine] = {}
    try:
        _run("ip", "link", "set", bridge, "up")
        for index, name in enumerate(names):
            made[name] = Machine(name, f"10.98.7.{index + 2}", bridge)
        yield made
    finally:
        for machine in made.values():
            machine.remove()
        subprocess.run(["ip", "link", "del", bridge], capture_output=True)
