"""Build a program from its models and make it ready for requests: what a gpu-let loads."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tenuto.errors import EnvironmentFaultError
from tenuto.profiles.networks.model_options import ModelOptions, RunOptions
from tenuto.profiles.networks.network import LoneModel
from tenuto.profiles.networks.runner import ProgramRunner, Streams

if TYPE_CHECKING:
    import torch

    from tenuto.profiles.networks.catalogue import LoadedModel


@dataclass(frozen=True)
class Member:
    """One model of a program, as a plan asks for it. `source` None: its name is that of the catalogue."""

    name: str
    source: str | None = None
    weights_path: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


def load_program(
    members: Sequence[Member], batch_sizes: Sequence[int], streams: Streams | None = None
) -> ProgramRunner:
    """Build a program on the CPU, or on CUDA where `streams` are given, and run every batch size as warm-up.

    Args:
        members: one model, or several that are merged and then run as one.
        batch_sizes: the planned ones, the rows of all members together.
        streams: of the process, on the first visible CUDA device.

    Raises:
        InvalidInputError: an unknown model or option, weights that do not fit, or models that do not merge.
        EnvironmentFaultError: not enough memory on the device, or the model cannot be compiled or captured.
    """
    import torch

    from tenuto.profiles.networks.models import build

    options = {member.name: ModelOptions.parse(member.options, f"options of {member.name}") for member in members}
    models: dict[str, LoadedModel] = {
        member.name: build(
            member.source or member.name, weights_path=member.weights_path, options=options[member.name].build
        )
        for member in members
    }
    name = "+".join(models)
    try:
        if len(models) == 1:
            runner = lone_program(name, models.pop(name), options[name].run, batch_sizes, streams)
        else:
            from tenuto.profiles.networks.merging.merged_network import MergedNetwork, check_run_options

            for member, mine in options.items():
                check_run_options(member, mine.run)
            network = MergedNetwork.of(models, batch_sizes)
            models.clear()
            with _on(streams):
                network.settle(_device(streams))
            runner = ProgramRunner(network, streams)
        runner.warm_up(max(mine.run.warmup_runs for mine in options.values()))
    except torch.OutOfMemoryError as error:
        raise EnvironmentFaultError(
            f"'{name}' does not fit into the device's memory at batch {max(batch_sizes)}. Plan a smaller batch, fewer "
            f"models on this GPU, {'' if streams is None or streams.depth == 1 else '`streaming: false`, '}or a larger "
            "memory cap."
        ) from error
    return runner


def lone_program(
    name: str, loaded: LoadedModel, options: RunOptions, batch_sizes: Sequence[int] = (), streams: Streams | None = None
) -> ProgramRunner:
    """Return a program of one model that is built already; nothing is run.

    Args:
        name: of the model.
        loaded: as `build` returns it; its module is moved to the device.
        options: how it is run; what they leave open is chosen for the device.
        batch_sizes: the planned ones.
        streams: see `load_program`.

    Raises:
        InvalidInputError: an option needs another device.
    """
    stream = None if streams is None else streams.kernels
    with _on(streams):
        return ProgramRunner(
            LoneModel(
                name,
                loaded,
                _device(streams),
                options.chosen(capability_of(streams)),
                batch_sizes=batch_sizes,
                stream=stream,
            ),
            streams,
        )


def capability_of(streams: Streams | None) -> tuple[int, int] | None:
    """Return the compute capability of the device that programs run on; None for a CPU."""
    if streams is None:
        return None
    import torch

    return torch.cuda.get_device_capability(0)


def _device(streams: Streams | None) -> torch.device:
    import torch

    return torch.device("cpu" if streams is None else "cuda:0")


def _on(streams: Streams | None) -> contextlib.AbstractContextManager[Any]:
    """Move and convert weights on the stream that reads them: on another one they would not be waited for."""
    if streams is None:
        return contextlib.nullcontext()
    import torch

    return torch.cuda.stream(streams.kernels)
