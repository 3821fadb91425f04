"""Runs a call in a process of its own, with limits of time and memory, so that whatever it reads cannot harm this one.

As a program it reads one pickled call from standard input and writes what it returns or raises to standard output. Only
this module starts it.
"""

from __future__ import annotations

import os
import pickle
import resource
import subprocess
import sys
from collections.abc import Callable
from typing import Any, TypeVar

from tenuto.errors import EnvironmentFaultError, TenutoError, first_line

T = TypeVar("T")

LIMIT_S = 30.0  # limit: imports on a busy machine take some 10 s, and a file within its bounds 5 s
_MOST_BYTES = 4 << 30  # limit: of the address space; libraries take 1 GiB of it, and a file within its bounds 1 GiB


def run_apart(call: Callable[..., T], *arguments: Any, limit_s: float = LIMIT_S) -> T:
    """Return what a call returns in a process of its own.

    Args:
        call: a function of a module.
        arguments: what can be pickled.
        limit_s: after so many seconds the process is killed.

    Raises:
        TenutoError: what the call raised.
        EnvironmentFaultError: it took too long or too much memory, or the process crashed.
    """
    name = call.__name__.strip("_").replace("_", " ")
    program = [sys.executable, "-P", "-m", "tenuto.deployments.process.apart"]
    # One thread: each one more of numpy's takes address space.
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    question = pickle.dumps((call, arguments))
    try:
        done = subprocess.run(program, input=question, stdout=subprocess.PIPE, timeout=limit_s, env=environment)
    except subprocess.TimeoutExpired:
        raise EnvironmentFaultError(
            f"to {name} took more than {limit_s:g} s and was ended. Check that every file can be read."
        ) from None
    if done.returncode != 0:
        raise EnvironmentFaultError(f"to {name} failed: its process ended with {done.returncode}. Its log says why.")
    value, error = pickle.loads(done.stdout)  # our own child wrote these bytes, so they are safe to unpickle
    if error is not None:
        raise error
    result: T = value
    return result


def main() -> None:
    """Carry out the call on standard input."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what is printed must not come into the answer
    resource.setrlimit(resource.RLIMIT_AS, (_MOST_BYTES, _MOST_BYTES))
    answer: tuple[Any, TenutoError | None]
    try:
        call, arguments = pickle.load(sys.stdin.buffer)
        answer = call(*arguments), None
    except TenutoError as error:
        answer = None, error
    except MemoryError:
        answer = None, EnvironmentFaultError(f"more than {_MOST_BYTES >> 30} GiB are needed. Give smaller files.")
    except Exception as error:
        answer = None, EnvironmentFaultError(f"an internal error, {type(error).__name__}: {first_line(error)}.")
    with answers:
        pickle.dump(answer, answers)


if __name__ == "__main__":
    main()
