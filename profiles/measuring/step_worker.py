"""Steps of models that generate, timed on shares of a device, each share of a GPU in a fresh process of its own.

The parent calls `measure_generation`; `python -m tenuto.profiles.measuring.step_worker` is the process that it starts.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, Protocol

from pydantic import Field, TypeAdapter

from tenuto.errors import EnvironmentFaultError
from tenuto.profiles.generation import BLOCK_TOKENS, StepCost, StepsAt
from tenuto.profiles.measuring.events import Failed, Machine
from tenuto.profiles.measuring.measure import NO_SHARES, Shares, check_share
from tenuto.profiles.measuring.profile_worker import describe_machine
from tenuto.profiles.measuring.step_timer import StepTimer, blocks_needed, measure_steps
from tenuto.profiles.measuring.worker_process import WorkerProcess, serve_parent
from tenuto.profiles.networks.cpu_share import cpu_threads
from tenuto.profiles.networks.device import pick_device
from tenuto.profiles.networks.generating import Generator, longest_sequence

WORKER = ["-m", "tenuto.profiles.measuring.step_worker"]

_LONGEST = 2048  # limit: tokens of the longest sequence that is timed; a context costs the same for each further token
_KINDS = 32  # derived: more kinds of steps than are timed on a share, among which its time is divided


@dataclass(frozen=True)
class StepRequest:
    """What to time: steps of at most so many sequences and tokens. `budget_s` is the time for the repetitions on all
    shares together. `config` is that of random weights."""

    source: str
    max_sequences: int
    max_batch_tokens: int
    device: str = "auto"
    shares: tuple[float, ...] = (100.0,)  # default
    budget_s: float = 20.0  # default
    weights_path: str | None = None
    seed: int = 0
    config: Mapping[str, Any] | None = None


REQUESTS: TypeAdapter[StepRequest] = TypeAdapter(StepRequest)


@dataclass(frozen=True)
class StepTimed:
    """One kind of step was timed: its median in ms."""

    what: str
    ms: float
    event: Literal["step"] = "step"


@dataclass(frozen=True)
class StepsTimed:
    """Steps were timed on a share: all of them, or those that have been so far. `disturbed` are those beside which
    other work ran."""

    steps: StepsAt
    kv_bytes_per_token: float
    weights_mib: float
    longest_context: int | None
    disturbed: tuple[str, ...] = ()
    is_whole: bool = True
    event: Literal["steps"] = "steps"


EVENTS: TypeAdapter[Any] = TypeAdapter(
    Annotated[Machine | StepTimed | StepsTimed | Failed, Field(discriminator="event")]
)


class MeasuredModel(Generator, Protocol):
    """A generator that says what it holds."""

    @property
    def kv_bytes_per_token(self) -> float:
        """The memory of one token's keys and values."""

    @property
    def weights_mib(self) -> float:
        """The memory of the weights."""


def measure_generation(
    request: StepRequest,
    *,
    shares: Shares | None,
    on_step: Callable[[str, float], None] = lambda _what, _ms: None,
    on_steps: Callable[[Machine, Sequence[StepsTimed]], None] = lambda _machine, _timed: None,
) -> tuple[Machine, list[StepsTimed]]:
    """Time the steps of a model on each share; blocks.

    Args:
        request: what to time.
        shares: gives a process a share of a CUDA device (CUDA MPS); None on a CPU, and for the whole device.
        on_step: takes what was timed, with its median in ms.
        on_steps: takes what is known of all shares so far, the largest first, each time that more is.

    Raises:
        InvalidInputError: a model that is not there, or makes no tokens.
        EnvironmentFaultError: the model does not fit this machine's libraries or memory, or a share is not enforced.
    """
    timed: dict[float, StepsTimed] = {}
    machine: Machine | None = None
    for part in _parts(request, shares):
        prefix = "" if request.shares == (100.0,) else f"{part.shares[0]:g} %: "
        worker = WorkerProcess(
            WORKER, {} if shares is None else shares.environment(part.shares[0]), request.source, EVENTS
        )
        try:
            worker.tell(REQUESTS.dump_json(part).decode())
            while (event := worker.next_event()) is not None:
                match event:
                    case Machine():
                        machine = event
                        if shares is not None:
                            check_share(part.shares[0], event.sm_count, shares)
                        elif event.device == "cuda" and part.shares != (100.0,):
                            raise EnvironmentFaultError(NO_SHARES)
                    case StepTimed():
                        on_step(prefix + event.what, event.ms)
                    case StepsTimed() if machine is not None:
                        timed[event.steps.share_pct] = event
                        on_steps(machine, tuple(timed.values()))
        finally:
            worker.end()
    if machine is None or not timed:
        raise EnvironmentFaultError(f"the process that timed '{request.source}' ended without a word")
    return machine, list(timed.values())


def _parts(request: StepRequest, shares: Shares | None) -> list[StepRequest]:
    """Return the requests of the processes, the largest share first: with shares of a GPU one for each."""
    falling = sorted(request.shares, reverse=True)
    budget_s = request.budget_s / len(falling)
    device = request.device if shares is None else "cuda"
    return [replace(request, device=device, shares=(share,), budget_s=budget_s) for share in falling]


def _load(request: StepRequest, device: str) -> tuple[MeasuredModel, int | None]:
    """Return the model with memory for what is timed, and how many tokens its positions reach."""
    from tenuto.profiles.networks.language_model import LanguageModel, load_language_model

    network = load_language_model(
        request.source, weights_path=request.weights_path, seed=request.seed, config=request.config
    )
    positions = longest_sequence(network.config)
    model = LanguageModel(
        network,
        device=device,
        blocks=blocks_needed(**limits_of(request, positions), block_tokens=BLOCK_TOKENS),
        block_tokens=BLOCK_TOKENS,
        max_batch_tokens=request.max_batch_tokens,
    )
    return model, positions


def limits_of(request: StepRequest, positions: int | None) -> dict[str, int]:
    """Return the limits of the steps that are timed."""
    longest = min(positions or _LONGEST, _LONGEST)
    return {"max_sequences": request.max_sequences, "max_batch_tokens": request.max_batch_tokens, "longest": longest}


def main(load: Callable[[StepRequest, str], tuple[MeasuredModel, int | None]] = _load) -> None:
    """Time the steps of one request; faults are reported as events, so that the parent can raise them again."""
    serve_parent(lambda report: _measure(REQUESTS.validate_json(sys.stdin.buffer.readline()), report, load), EVENTS)


def _measure(
    request: StepRequest,
    report: Callable[[Any], None],
    load: Callable[[StepRequest, str], tuple[MeasuredModel, int | None]],
) -> None:
    device = pick_device(request.device)
    report(describe_machine(device))
    (share_pct,) = request.shares
    if device == "cpu":
        import torch

        torch.set_num_threads(cpu_threads(share_pct))
    model, positions = load(request, device)
    timer = StepTimer(model, budget_s=request.budget_s / _KINDS, on_step=lambda what, ms: report(StepTimed(what, ms)))

    def tell(cost: StepCost, *, is_whole: bool) -> None:
        steps = StepsAt.model_validate({**cost.model_dump(), "share_pct": share_pct})
        held = model.kv_bytes_per_token, model.weights_mib, positions
        report(StepsTimed(steps, *held, tuple(timer.disturbed), is_whole))

    limits = limits_of(request, positions)
    tell(measure_steps(timer, **limits, on_cost=lambda cost: tell(cost, is_whole=False)), is_whole=True)


if __name__ == "__main__":
    main()
