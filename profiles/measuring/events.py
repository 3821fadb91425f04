"""The events that the profiler's worker processes report, one JSON object per line; each kind is a type."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter

from tenuto.errors import EnvironmentFaultError, InvalidInputError, TenutoError
from tenuto.profiles.profile import ProfilePoint


@dataclass(frozen=True)
class Machine:
    """The machine of a measurement. `sm_count` is the number of SMs that the process sees: under CUDA MPS those of its
    share; None on a CPU."""

    device: str  # cpu or cuda
    gpu_type: str
    hardware: str
    memory_mib: float
    versions: Mapping[str, str]
    sm_count: int | None = None
    event: Literal["machine"] = "machine"


@dataclass(frozen=True)
class Built:
    """The model is on its device. `run` has all options of how it is run. `pads`: its inputs can be padded.
    `multiples`: of which its sizes are, by name."""

    weights_mib: float
    run: Mapping[str, Any] = field(default_factory=dict)
    pads: bool = True
    multiples: Mapping[str, int] = field(default_factory=dict)
    event: Literal["built"] = "built"


@dataclass(frozen=True)
class ContextSize:
    """Memory in MiB that the process holds on the GPU outside PyTorch's allocator: CUDA's context, loaded kernels,
    workspaces of libraries."""

    mib: float
    event: Literal["context"] = "context"


@dataclass(frozen=True)
class PointMeasured:
    """One point was measured."""

    point: ProfilePoint
    event: Literal["point"] = "point"


@dataclass(frozen=True)
class Doubt:
    """A note that a reader of the profile should know."""

    text: str
    event: Literal["doubt"] = "doubt"


@dataclass(frozen=True)
class StoppedEarly:
    """The time was over before every point was measured."""

    event: Literal["stopped"] = "stopped"


@dataclass(frozen=True)
class Failed:
    """The process gives up. `is_input`: the cause is the request, and not the machine."""

    text: str
    is_input: bool = False
    event: Literal["failed"] = "failed"

    @classmethod
    def of(cls, error: TenutoError) -> Failed:
        """Describe a fault, so that the parent can raise it again."""
        return cls(str(error), isinstance(error, InvalidInputError))

    def error(self) -> TenutoError:
        """Return the fault for the parent to raise."""
        return InvalidInputError(self.text) if self.is_input else EnvironmentFaultError(self.text)


Event = Annotated[
    Machine | Built | ContextSize | PointMeasured | Doubt | StoppedEarly | Failed, Field(discriminator="event")
]
EVENTS: TypeAdapter[Any] = TypeAdapter(Event)
