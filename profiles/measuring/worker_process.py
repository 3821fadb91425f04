"""A worker process of the profiler: start it with a request, read its events, and end it without harm to others."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any

from pydantic import TypeAdapter

from tenuto.errors import EnvironmentFaultError, TenutoError
from tenuto.profiles.measuring.events import EVENTS, Failed
from tenuto.profiles.networks.cpu_share import calm_openmp

_SETTLE_S = 10.0  # limit: time for a running batch to end after SIGINT


class LostWorkerError(EnvironmentFaultError):
    """A worker ended before it had reported everything."""

    def __init__(self, message: str, code: int) -> None:
        """Keep what the process ended with, negative for a signal's number."""
        super().__init__(message, code)
        self.code = code

    def __str__(self) -> str:
        return str(self.args[0])


class LineProcess:
    """A Python process that takes and prints lines. A thread reads its lines, so that waiting for one has a limit.

    As every process of ours it runs with -P: what lies in the working folder must not stand for what is installed.
    """

    def __init__(
        self, arguments: Sequence[str], environment: Mapping[str, str], name: str, errors: IO[str] | int
    ) -> None:
        """Start it.

        Args:
            arguments: of Python.
            environment: of the process.
            name: of the thread.
            errors: where its stderr goes.
        """
        self._process = subprocess.Popen(
            [sys.executable, "-P", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            encoding="utf-8",
            env=environment,
        )
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._collect, name=name, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def _collect(self) -> None:
        for line in self._process.stdout or ():
            self._lines.put(line)
        self._lines.put(None)

    def _next_line(self, timeout_s: float | None) -> str | None:
        """Return the next line; None whenever the process has ended; raises `queue.Empty` after the timeout."""
        line = self._lines.get(timeout=timeout_s)
        if line is None:
            self._lines.put(None)
        return line

    def tell(self, line: str = "") -> None:
        """Send a line. If the process is gone, this shows when its next event is awaited."""
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.write(line + "\n")
                self._process.stdin.flush()

    def _close(self) -> None:
        """Close the pipes of a process that has ended."""
        self._reader.join(timeout=5.0)  # limit: for the thread to end
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):  # lines that the process did not read
                    pipe.close()


class WorkerProcess(LineProcess):
    """One worker."""

    def __init__(
        self, arguments: Sequence[str], environment: Mapping[str, str], about: str, events: TypeAdapter[Any] = EVENTS
    ) -> None:
        """Start it.

        Args:
            arguments: of Python.
            environment: beside this process's own, such as its share of a GPU.
            about: the model, for errors.
            events: what it may report, `Failed` among it.
        """
        self._events = events
        variables = {**os.environ, **environment}
        calm_openmp(variables)
        self._about = about
        self._errors = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115 - open until `end`
        super().__init__(arguments, variables, f"profiling {about}", self._errors)

    def next_event(self, timeout_s: float | None = None) -> Any:
        """Return the next event; None when the process has ended well.

        Raises:
            TenutoError: the fault that the process reported.
            LostWorkerError: the process was killed or crashed.
            EnvironmentFaultError: the process reported nothing within `timeout_s`.
        """
        try:
            line = self._next_line(timeout_s)
        except queue.Empty:
            raise EnvironmentFaultError(
                f"'{self._about}' said nothing for {timeout_s:g} s. Measure it alone first."
            ) from None
        if line is None:
            code = self._process.wait(60.0)
            if code != 0:
                raise LostWorkerError(
                    f"the process of '{self._about}' ended with code {code}: {self._last_words()}. Set TENUTO_DEBUG=1 "
                    "for all it printed.",
                    code,
                )
            return None
        event = self._events.validate_json(line)
        if isinstance(event, Failed):
            raise event.error()
        return event

    def _last_words(self) -> str:
        self._errors.seek(0)
        text = self._errors.read()
        if os.environ.get("TENUTO_DEBUG"):
            sys.stderr.write(text)
        lines = text.strip().splitlines()
        return lines[-1] if lines else "no message"

    def end(self, patience_s: float = 0.0, settle_s: float = _SETTLE_S) -> None:
        """Let the process end by itself. After `patience_s` interrupt it; kill it only after another `settle_s`.

        To kill a CUDA MPS client while its kernels run would harm its neighbours. So the process is interrupted first,
        which lets the batch end.
        """
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        steps: tuple[tuple[Callable[[], None], float], ...] = (
            (lambda: None, patience_s),
            (lambda: self._process.send_signal(signal.SIGINT), settle_s),
            (self._process.terminate, 5.0),  # limit: until the next, harder way
            (self._process.kill, 60.0),
        )
        for ask, wait_s in steps:
            ask()
            try:
                self._process.wait(wait_s)
                break
            except subprocess.TimeoutExpired:
                continue
        self._close()
        self._errors.close()


def serve_parent(work: Callable[[Callable[[Any], None]], None], events: TypeAdapter[Any] = EVENTS) -> None:
    """Run `work` in a worker, with a function that reports events. A fault is reported as the last event.

    Output that a model prints goes to stderr. After an interrupt, the device finishes the work that it has begun.
    """
    with os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8") as reports:
        os.dup2(2, 1)

        def report(event: Any) -> None:
            reports.write(events.dump_json(event, exclude_none=True).decode() + "\n")

        try:
            work(report)
        except TenutoError as error:
            report(Failed.of(error))
        except KeyboardInterrupt:
            _settle()
            sys.exit(130)


def _settle() -> None:
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        with contextlib.suppress(RuntimeError):
            torch.cuda.synchronize()
