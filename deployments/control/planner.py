"""Runs the planner in a process of its own. A policy may take long, take much memory, or crash; the controller goes on.

As a program it reads pickled questions from standard input and writes pickled answers to standard output. Only the
controller starts it. It stays, so that an answer need not wait for imports.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import IO

from tenuto.errors import TenutoError
from tenuto.placement.planner import PlanRequest, Proposal, propose
from tenuto.profiles import Profiles

_START_S = 60.0  # limit: for imports on a busy machine
_ENDS_S = 60.0  # limit: after a kill


class NoPlanner:
    """Stands in when an operator gives the plan: nobody asks."""

    def ask(self, number: int, request: PlanRequest) -> None:
        """Ignore the question."""

    def answers(self) -> list[tuple[int, Proposal | str]]:
        """Return nothing."""
        return []

    def close(self) -> None:
        """Do nothing: there is nothing to end."""


class PlannerProcess:
    """One process that answers one question at a time. When an answer takes too long, the process is killed and another
    one starts."""

    def __init__(self, profiles: Profiles, timeout_s: float, *, on_answer: Callable[[], None] = lambda: None) -> None:
        """Start it.

        Args:
            profiles: what is planned with.
            timeout_s: limit for a plan.
            on_answer: called on a thread of its own when `answers` has something new.
        """
        self._profiles, self._timeout_s, self._on_answer = profiles, timeout_s, on_answer
        self._answers: list[tuple[int, Proposal | str]] = []
        self._lock = threading.Lock()
        self._is_busy = False
        self._next = 0, b""  # the next question: number, pickled
        self._start()

    def _start(self) -> None:
        program = [sys.executable, "-P", "-m", "tenuto.deployments.control.planner"]
        self._process = subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._is_up = self._is_busy = False

    @property
    def pid(self) -> int:
        """The process that answers now."""
        return self._process.pid

    def ask(self, number: int, request: PlanRequest) -> None:
        """Begin to answer; drop the previous question."""
        with self._lock:
            if self._process.poll() is not None or (self._is_busy and self._is_up):
                self._process.kill()  # the waiting thread closes its pipes
                self._start()
            self._next = number, pickle.dumps((request, self._profiles))
            if self._is_busy:
                return  # it is starting, and takes this question first
            self._is_busy = True
            process = self._process
        threading.Thread(target=self._wait, args=(process,), daemon=True, name="planner").start()

    def _wait(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        limit_s = _START_S
        alarm = threading.Timer(limit_s, process.kill)
        alarm.start()
        answer: Proposal | str
        try:
            # On a busy machine the imports take longer than a plan may.
            if not self._is_up:
                pickle.load(process.stdout)
            with self._lock:
                if self._process is process:
                    self._is_up = True
                _, question = self._next
            alarm.cancel()
            limit_s = self._timeout_s
            alarm = threading.Timer(limit_s, process.kill)
            alarm.start()
            process.stdin.write(question)
            process.stdin.flush()
            answer = pickle.load(process.stdout)
        except (OSError, EOFError, pickle.UnpicklingError):
            code = process.wait(_ENDS_S)
            _close_pipes(process)
            late = not alarm.is_alive()
            answer = (
                f"the planner took more than {limit_s:g} s" if late else f"the planner's process ended with code {code}"
            )
        finally:
            alarm.cancel()
        with self._lock:
            if self._process is not process:
                return
            self._is_busy = False
            self._answers.append((self._next[0], answer))
        self._on_answer()

    def answers(self) -> list[tuple[int, Proposal | str]]:
        """Return the answers since the last call, with the numbers of their questions."""
        with self._lock:
            answers, self._answers = self._answers, []
        return answers

    def close(self) -> None:
        """End the process."""
        with self._lock:
            self._process.kill()
            self._process.wait(_ENDS_S)
            if not self._is_busy:
                _close_pipes(self._process)


def _close_pipes(process: subprocess.Popen[bytes]) -> None:
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):  # a question that nobody read
                pipe.close()


def answer_questions(questions: IO[bytes], answers: IO[bytes]) -> None:
    """Answer until there are no more questions. The first thing written says that the imports are done."""
    pickle.dump("ready", answers)
    answers.flush()
    while True:
        try:
            request, profiles = pickle.load(questions)
        except EOFError:
            return
        answer: Proposal | str
        try:
            answer = propose(request, profiles)
        except TenutoError as error:
            answer = str(error)
        except Exception as error:  # a policy may be anybody's code
            answer = f"the policy failed: {type(error).__name__}: {error}"
        pickle.dump(answer, answers)
        answers.flush()


if __name__ == "__main__":
    # What a policy prints must not come between the answers.
    own = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    answer_questions(sys.stdin.buffer, own)
