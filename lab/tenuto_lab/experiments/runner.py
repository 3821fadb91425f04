"""Runs an experiment's points, on several processes if asked, and keeps what is finished when it is interrupted."""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import BrokenExecutor, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from typing import Any

from tenuto.errors import EnvironmentFaultError
from tenuto_lab.experiments.case import Case, run_case

Report = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Finished:
    """The rows of the points that ran, in the order of the cases. `is_whole` is False after an interruption."""

    rows: list[dict[str, Any]]
    is_whole: bool


def run_cases(cases: Sequence[Case], schedulers: Sequence[str], *, jobs: int, report: Report) -> Finished:
    """Run all cases; an interruption (Ctrl-C) ends the run early with what is finished.

    Args:
        cases: the points.
        schedulers: run each under these.
        jobs: processes; 1 runs here.
        report: called after each point with how many are done, of how many, and which it was.

    Raises:
        EnvironmentFaultError: a process died, for want of memory for example.
    """
    work = partial(run_case, schedulers=tuple(schedulers))
    if jobs <= 1 or len(cases) <= 1:
        return run_here(cases, work, report)
    return _run_on_processes(cases, work, min(jobs, len(cases)), report)


def run_here(cases: Sequence[Case], work: Callable[[Case], dict[str, Any]], report: Report) -> Finished:
    """Run all cases in this process, one after the other; see `run_cases`."""
    rows: list[dict[str, Any]] = []
    try:
        for case in cases:
            rows.append(work(case))
            report(len(rows), len(cases), case.key)
    except KeyboardInterrupt:
        return Finished(rows, is_whole=False)
    return Finished(rows, is_whole=True)


def _run_on_processes(
    cases: Sequence[Case], work: Callable[[Case], dict[str, Any]], jobs: int, report: Report
) -> Finished:
    done: dict[int, dict[str, Any]] = {}
    is_whole = True
    # Spawned, not forked: the parent may hold threads. The children leave Ctrl-C to it, from their first moment on.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(
        jobs, mp_context=context, initializer=signal.signal, initargs=(signal.SIGINT, signal.SIG_IGN)
    )
    futures: dict[Future[dict[str, Any]], int] = {}
    try:
        with _no_interrupts():
            futures = {pool.submit(work, case): position for position, case in enumerate(cases)}
        pending = set(futures)
        while pending:
            finished, pending = wait(pending, return_when="FIRST_COMPLETED")
            for future in finished:
                position = futures[future]
                done[position] = future.result()
                report(len(done), len(cases), cases[position].key)
    except KeyboardInterrupt:
        is_whole = False
    except (OSError, BrokenExecutor) as error:
        raise EnvironmentFaultError(f"a process of the experiment failed: {error}. Try --jobs 1.") from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
    for future, position in futures.items():
        if not is_whole and future.done() and not future.cancelled() and future.exception() is None:
            done[position] = future.result()
    return Finished([done[position] for position in sorted(done)], is_whole)


@contextlib.contextmanager
def _no_interrupts() -> Iterator[None]:
    """Ignore Ctrl-C while processes are started, so that they inherit this. Other threads cannot set handlers, and do
    not need to."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
