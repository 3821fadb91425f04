"""Follows a change that the controller carries out, until it is over, and reports its log meanwhile.

Every desired deployment has a number, and every state and log line of the controller says of which number it speaks. So
a command waits for its own deployment, and learns when another command has wanted another one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from tenuto.deployments.serve.config import CONTROL_APPLICATION, ENTRY_APPLICATION, is_ours
from tenuto.deployments.serve.states import ApplicationState
from tenuto.deployments.wire.status import ControllerState, LogLine
from tenuto.errors import EnvironmentFaultError

_LOOK_S = 0.25  # pace: between looks
_LINES = 100  # limit: lines of the log that are read at each look
_SILENT_S = 360.0  # limit: a stage has two minutes by default (`change.ready_timeout_s`), and five at the first start


class ControllerStatusSide(Protocol):
    """What is asked of the controller; `ControllerClient` on a real cluster."""

    def state(self) -> ControllerState:
        """Return the state."""

    def log(self, limit: int) -> list[LogLine]:
        """Return the newest entries of the log, oldest first."""


class ChangeProgress:
    """Waits for the controller. It changes nothing, so the change goes on when the wait is interrupted."""

    def __init__(
        self,
        controller: ControllerStatusSide,
        report: Callable[[str], None],
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`report` receives what happens, in words; `sleep` waits for seconds, and the wait ends when it raises."""
        self._controller, self._report, self._sleep, self._clock = controller, report, sleep, clock

    def await_start(self, number: int, read_states: Callable[[], Mapping[str, ApplicationState]]) -> None:
        """Wait until the first deployment runs, with all its applications.

        Raises:
            EnvironmentFaultError: it does not start, or another command wanted another deployment meanwhile.
        """
        reported, reported_at, has_controller, end = "", self._clock(), False, None
        while True:
            states = {name: state for name, state in read_states().items() if is_ours(name)}  # after the end was read
            if has_controller and CONTROL_APPLICATION not in states:
                raise EnvironmentFaultError("another command deleted what was being brought up.")
            has_controller = CONTROL_APPLICATION in states
            is_late = self._clock() - reported_at > _SILENT_S
            for name, state in states.items():  # where many processes start at once, one that runs may miss a check
                if state.has_failed or (is_late and state.is_broken):
                    raise EnvironmentFaultError(f"application {name} did not start:\n{state.essence}")
            if end is not None and not end.reached:
                raise EnvironmentFaultError(f"{end.text}. See `ray status`.")
            running = sum(state.is_running for state in states.values())
            is_up = end is not None and running == len(states)
            text = f"{running}/{len(states)} applications run{', gpu-lets connected' if is_up else ''}"
            if ENTRY_APPLICATION not in states:
                text = "starting the controller"
            if text != reported:
                self._report(text)
                reported, reported_at = text, self._clock()
            if is_up:
                return
            if is_late:
                raise EnvironmentFaultError(f"the gateways have not answered for {_SILENT_S:g} s. Run `tenuto status`.")
            self._sleep(_LOOK_S)
            end = self._end_of_start(number) if has_controller and states[CONTROL_APPLICATION].is_running else None

    def _end_of_start(self, number: int) -> LogLine | None:
        """Return the line that ends the first start, once the gateways follow the plan or never will. None: the start
        goes on, or the controller starts again."""
        try:
            state, lines = self._controller.state(), self._controller.log(_LINES)
            is_settled = self._controller.state().is_settled
        except EnvironmentFaultError:
            return None
        end = _end_of(number, state, lines)
        return end if end is not None and (is_settled or not end.reached) else None

    def await_change(self, number: int) -> bool:
        """Return whether the desired deployment with this number was reached, once the change is over and its traces
        are gone, or the next change has begun. When it was not reached, the previous deployment runs again.

        Raises:
            EnvironmentFaultError: another command wanted another deployment meanwhile, or the controller is silent.
        """

        def is_over(state: ControllerState, lines: Sequence[LogLine]) -> bool:
            if _end_of(number, state, lines) is None:
                return False
            state = self._controller.state()  # the other one may be of this change, before its end
            return state.is_settled or state.change is not None

        state, lines = self._follow(lambda line: line.number == number, is_over)
        end = _end_of(number, state, lines)
        return end is not None and bool(end.reached)

    def await_edit(self, number: int) -> tuple[ControllerState, list[LogLine]]:
        """Return the state, and the log since the edits with this number, once they are carried out or will not be.

        Raises:
            EnvironmentFaultError: the controller is silent.
        """
        return self._follow(
            lambda line: line.number >= number, lambda state, _lines: not state.awaits and state.is_settled
        )

    def _follow(
        self, concerns: Callable[[LogLine], bool], is_over: Callable[[ControllerState, Sequence[LogLine]], bool]
    ) -> tuple[ControllerState, list[LogLine]]:
        heard_at, lines = self._clock(), list[LogLine]()
        while self._clock() - heard_at < _SILENT_S:
            state = self._controller.state()  # before the log, which then says how it ended
            reported, lines = len(lines), [line for line in self._controller.log(_LINES) if concerns(line)]
            for line in lines[reported:]:
                self._report(f"{line.kind}: {line.text}")
                heard_at = self._clock()
            if is_over(state, lines):
                return state, lines
            self._sleep(_LOOK_S)
        raise EnvironmentFaultError(
            f"the controller has said nothing of the change for {_SILENT_S:g} s. See `tenuto control log`."
        )


def _end_of(number: int, state: ControllerState, lines: Sequence[LogLine]) -> LogLine | None:
    """Return the line that ends the change to a desired deployment; None: the change goes on.

    Raises:
        EnvironmentFaultError: another deployment was wanted before the change was over.
    """
    end = next((line for line in lines if line.number == number and line.reached is not None), None)
    if end is None and state.number > number:
        raise EnvironmentFaultError(
            "somebody else deployed another plan meanwhile, and the controller goes over to that. See `tenuto history`."
        )
    return end
