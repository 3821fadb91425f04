"""A limit for every call that may block, and the time that answers have to end.

Most calls of Ray and Serve have no timeout and wait for ever for a stopped process.
`tests/deployments/process/test_limits.py` finds calls without a limit.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import ParamSpec, TypeVar

from tenuto.errors import EnvironmentFaultError

P = ParamSpec("P")
T = TypeVar("T")

# Limit: on two busy cores Ray and Serve answered all calls but a start within 3 s. When the limit is too long, users
# wait that long for a Ray that hangs. When it is too short, a cluster that is only slow is refused.
ANSWER_S = 20.0
# limit: for requests under way when their process is told to end; no batch takes that long
REQUESTS_END_S = 8.0
# limit: for generations then, which take longer: as long as Kubernetes gives a pod to end by default
GENERATIONS_END_S = 30.0


def within(limit_s: float, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Return what a call returns, or raise what it raises, within `limit_s` seconds.

    The call runs on a thread of its own. When it takes longer, it goes on there, as Python cannot end a thread, and its
    result is lost.

    Raises:
        EnvironmentFaultError: the call took too long.
    """
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(call(*args, **kwargs))
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, name="within", daemon=True).start()
    try:
        return result.result(limit_s)
    except TimeoutError:
        if result.done():  # the call itself raised this TimeoutError
            raise
        name = getattr(call, "__qualname__", repr(call))
        raise EnvironmentFaultError(
            f"Ray does not answer: {name} has taken more than {limit_s:g} s. See `ray status` and `tenuto doctor`; a "
            "process of Ray may be stopped."
        ) from None
