"""The process in the foreground: whatever happens to it and behind it, it ends, and leaves nothing running."""

import os
import random
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator

import pytest

from tests.instruments.forking import ROOT
from tests.instruments.live import PATIENCE_S, until, with_mark
from tests.instruments.seeds import seeds

PROGRAM = """
import os, signal, subprocess, sys, time
from tenuto.deployments.process import foreground
from tenuto.deployments.process.foreground import Stopped, run_in_front

foreground._HUNG_S, foreground.DRAIN_S, foreground._LEFT_S = 0.5, float(sys.argv[2]), 1.0

def say(text):
    os.write(1, (text + "\\n").encode())

def beside():
    # Deaf to what asks politely, in a session of its own, with no parent after a moment.
    code = "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); os.fork(); time.sleep(600)"
    subprocess.Popen([sys.executable, "-c", code], start_new_session=True)

def serving(orders):
    beside()
    orders.serving()
    say("serving")
    try:
        while True:
            orders.sleep(0.05)
            if orders.take_reload():
                say("reloaded")
    except Stopped:
        orders.ending()
        say("draining")
    return 0

def early(orders):
    time.sleep(600)

def interrupted_fork(fork=os.fork):
    say("serving")
    child = fork()
    if child:
        os.kill(os.getpid(), signal.SIGTERM)  # before the next line of the foreground
    return child

if sys.argv[1] == "early":
    os.fork = interrupted_fork

def starting(orders):
    beside()
    say("serving")
    time.sleep(600)

def joining(orders):
    orders.joined()
    say("serving")
    try:
        orders.sleep(600)
    except Stopped:
        say("removed")
    return 0

def unheard(orders):
    os.kill(os.getppid(), signal.SIGSTOP)
    serving(orders)
    return 0

def deaf(orders):
    orders.serving()
    say("serving")
    orders.to_stop.wait()
    say("deaf")
    time.sleep(600)

def failing(orders):
    orders.serving()
    say("serving")
    return 3

def crashing(orders):
    orders.serving()
    say("serving")
    os.kill(os.getpid(), signal.SIGKILL)

def hanging(orders):
    orders.serving()
    say("serving")
    os.kill(os.getpid(), signal.SIGSTOP)

def sparing(orders):
    agent = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)  # ray::" + "DashboardAgent"])
    agent.send_signal(signal.SIGSTOP)
    time.sleep(2)
    alive = agent.poll() is None
    orders.ending()
    say("serving")
    return 0 if alive else 9

def losing(orders):
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1)  # gcs" + "_server"])
    orders.serving()
    say("serving")
    time.sleep(600)

def taken(orders):
    vital = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)  # gcs" + "_server"])
    orders.await_look()
    say("serving")
    vital.kill()
    vital.wait()
    if sys.argv[1] == "ended":
        os._exit(1)
    orders.await_look()
    say("looked")
    return 0

ended = taken

def unharmed(orders):
    say("serving")
    orders.await_look()
    return 5

sys.exit(run_in_front(globals()[sys.argv[1]], say))
"""


class Front:
    """A program with a process in the foreground, found with all that is below it by a mark in the environment."""

    def __init__(self, work: str, drain_s: float = 60.0) -> None:
        self.mark = uuid.uuid4().hex
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, work, str(drain_s)],
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "TENUTO_TEST_MARK": self.mark},
        )
        assert self.process.stdout is not None
        self.said: list[str] = []
        self.hear("serving")

    def rest(self) -> str:
        """Read until it has ended."""
        assert self.process.stdout is not None
        return self.process.stdout.read()

    def reload_twice(self) -> None:
        for _ in range(2):
            self.process.send_signal(signal.SIGHUP)
            self.hear("reloaded")
            self.said.clear()

    def hear(self, word: str) -> None:
        """Read on until it says a word."""
        assert self.process.stdout is not None
        while not self.said or word not in self.said[-1]:
            line = self.process.stdout.readline()
            assert line, self.said
            self.said.append(line.strip())

    def code(self) -> int:
        """Return its exit code, once it has ended; what it killed last may need a moment more, nothing stays."""
        code = self.process.wait(PATIENCE_S)
        until(lambda: self.running() == [])
        return code

    def close(self) -> None:
        """Kill what is left."""
        for pid in self.running():
            os.kill(pid, signal.SIGKILL)
        self.process.communicate()

    def running(self) -> list[int]:
        """Return all processes of it."""
        return with_mark(self.mark)


@pytest.fixture
def ended() -> Iterator[list[Front]]:
    """What is put here is killed at the end."""
    fronts: list[Front] = []
    yield fronts
    for front in fronts:
        front.close()


@pytest.mark.parametrize(
    ("work", "drain_s", "signals", "code"),
    [
        ("serving", 60.0, (signal.SIGTERM,), 0),
        ("serving", 60.0, (signal.SIGINT,), 0),
        ("starting", 60.0, (signal.SIGTERM,), 143),
        ("starting", 60.0, (signal.SIGINT,), 130),
        ("early", 60.0, (), 143),
        ("joining", 60.0, (signal.SIGTERM,), 143),
        ("deaf", 60.0, (signal.SIGTERM, signal.SIGINT), 130),
        ("deaf", 0.3, (signal.SIGTERM,), 3),
        ("failing", 60.0, (), 3),
        ("crashing", 60.0, (), 3),
        ("hanging", 60.0, (), 3),
        ("losing", 60.0, (), 3),
        ("sparing", 60.0, (), 0),
        ("unharmed", 60.0, (), 5),
    ],
)
def test_every_end_has_its_code_and_leaves_nothing(
    ended: list[Front], work: str, drain_s: float, signals: tuple[signal.Signals, ...], code: int
) -> None:
    front = Front(work, drain_s)
    ended.append(front)
    for number in signals:
        front.process.send_signal(number)
        if number is not signals[-1]:  # the system hands out those that wait by their numbers
            front.hear("deaf")
    assert front.code() == code


def test_who_was_told_that_it_serves_ends_it_as_what_serves(ended: list[Front]) -> None:
    """A busy foreground learns both at once; it ended what it took for a start by force."""
    front = Front("unheard")
    ended.append(front)
    front.process.send_signal(signal.SIGTERM)
    front.process.send_signal(signal.SIGCONT)
    assert front.code() == 0


@pytest.mark.parametrize("seed", seeds(1, 3))
def test_signals_at_once_in_any_number_and_order_end_it(ended: list[Front], seed: int) -> None:
    """One hung it for ever: the handler of the second one came into the handler of the first."""
    draw = random.Random(26 + seed)
    for _ in range(8):
        front = Front("serving")
        ended.append(front)
        for _ in range(draw.randint(2, 12)):
            front.process.send_signal(draw.choice((signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD)))
            time.sleep(draw.choice((0.0, 0.0, 1e-5, 1e-3)))
        front.process.send_signal(signal.SIGTERM)
        assert front.code() in (0, 130, 143)


def test_a_hang_up_reloads(ended: list[Front]) -> None:
    front = Front("serving")
    ended.append(front)
    front.reload_twice()
    front.process.send_signal(signal.SIGTERM)
    assert front.code() == 0


@pytest.mark.parametrize("work", ["taken", "ended"])
def test_what_was_lost_is_said_whatever_it_does_to_what_serves(ended: list[Front], work: str) -> None:
    front = Front(work)
    ended.append(front)
    said = front.rest()
    assert front.code() == 3
    assert "Ray's head (GCS) died: nothing can serve without it: ending all. Run the command again" in said
    assert "looked" not in said


def test_what_is_behind_ends_when_the_foreground_is_killed(ended: list[Front]) -> None:
    front = Front("joining")
    ended.append(front)
    front.process.kill()
    front.hear("removed")
    until(lambda: front.running() == [])
