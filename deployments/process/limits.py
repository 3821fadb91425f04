"""A limit for every call that may block. Most calls of Ray and Serve take no timeout, and wait for ever for a process
that has stopped. `tests/deployments/process/test_limits.py` finds the calls that are made without one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import ParamSpec, TypeVar

from tenuto.errors import EnvironmentFaultError

P = ParamSpec("P")
T = TypeVar("T")

# Fitted: on two busy cores Ray and Serve answered everything but a start within 3 s. A limit that is too long costs
# that much waiting where Ray hangs; one that is too short refuses a cluster that is only slow.
ANSWER_S = 20.0


def within(limit_s: float, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Return what a call returns, or raise what it raises, within `limit_s` seconds.

    The call runs on a thread of its own. One that takes longer goes on there, and its result is lost: Python cannot
    end a thread.

    Raises:
        EnvironmentFaultError: nothing came in time.
    """
    found: Future[T] = Future()

    def run() -> None:
        try:
            found.set_result(call(*args, **kwargs))
        except BaseException as error:
            found.set_exception(error)

    threading.Thread(target=run, name="within", daemon=True).start()
    try:
        return found.result(limit_s)
    except TimeoutError:
        if found.done():  # the call's own
            raise
        name = getattr(call, "__qualname__", repr(call))
        raise EnvironmentFaultError(
            f"Ray does not answer: {name} has taken more than {limit_s:g} s. See `ray status` and `tenuto doctor`; a "
            "process of Ray may be stopped."
        ) from None
