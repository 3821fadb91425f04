"""Builds a program from its models and makes it ready for requests, or says that the device is out of memory."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tenuto.errors import EnvironmentFaultError, InvalidInputError, TenutoError, first_line, is_lack_of_memory
from tenuto.profiles.networks.model_options import ModelOptions, RunOptions
from tenuto.profiles.networks.network import LoneModel
from tenuto.profiles.networks.runner import ProgramRunner, Streams

if TYPE_CHECKING:
    import torch

    from tenuto.profiles.networks.catalogue import LoadedModel


@dataclass(frozen=True)
class Member:
    """One model of a program, as a plan asks for it. `source` None: its name is a name of the catalogue."""

    name: str
    source: str | None = None
    weights_path: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


def load_program(
    members: Sequence[Member],
    batch_sizes: Sequence[int],
    streams: Streams | None = None,
    prepared_file: str | None = None,
) -> ProgramRunner:
    """Build a program on CUDA if `streams` are given, else on the CPU, and run every batch size as warm-up.

    Args:
        members: one model, or several that run as one.
        batch_sizes: the planned sizes; they count the rows of all members.
        streams: the streams of the process, on the first visible CUDA device.
        prepared_file: the file that `prepare_program` wrote. Without it, several members run as single graphs in turn.
            With it, only one batch runs as warm-up: requests wait meanwhile, and the single graphs have already warmed
            up most things.

    Raises:
        InvalidInputError: an unknown model or option, or weights that do not fit.
        EnvironmentFaultError: not enough memory on the device, or the model cannot be compiled or captured.
    """
    import torch

    options = {member.name: ModelOptions.parse(member.options, f"options of {member.name}") for member in members}
    name = "+".join(options)
    try:
        if len(members) == 1:
            runner = lone_program(name, _built(members[0]), options[name].run, batch_sizes, streams)
        else:
            from tenuto.profiles.networks.merging.joint_network import load_joint_network

            runs = {member: mine.run for member, mine in options.items()}
            built = {member.name: functools.partial(_built, member) for member in members}
            with _on(streams):
                network = load_joint_network(built, runs, batch_sizes, _device(streams), prepared_file)
            runner = ProgramRunner(network, streams)
        if prepared_file is None:
            runner.warm_up(max(mine.run.warmup_runs for mine in options.values()))
        else:
            runner.warm_up_with(runner.network.warm_up_rows()[len(batch_sizes) - 1])  # the largest joint batch
    except torch.OutOfMemoryError as error:
        raise EnvironmentFaultError(
            f"'{name}' does not fit into the device's memory at batch {max(batch_sizes)}. Plan a smaller batch, fewer "
            f"models on this GPU, {'' if streams is None or streams.depth == 1 else '`streaming: false`, '}or a larger "
            "memory cap."
        ) from error
    return runner


def _built(member: Member) -> LoadedModel:
    from tenuto.profiles.networks.models import build

    options = ModelOptions.parse(member.options, f"options of {member.name}")
    with naming(member.name):
        return build(member.source or member.name, weights_path=member.weights_path, options=options.build)


@contextlib.contextmanager
def naming(model: str) -> Iterator[None]:
    """Have errors name the model that cannot be built: a gpu-let has several, and each may have files."""
    try:
        yield
    except TenutoError as error:
        raise type(error)(f"model '{model}': {error}") from error
    except Exception as error:  # a source may be anybody's code
        if is_lack_of_memory(error):
            raise
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise InvalidInputError(
            f"model '{model}' cannot be built ({reason}). Correct its source, or its files."
        ) from error


def prepare_program(members: Sequence[Member], file: str) -> None:
    """Make one network of the members of a program on the CPU, and write it to a file for `load_program`.

    PyTorch changes modules for the whole process while it traces, so call this in a process that serves nothing.

    Raises:
        InvalidInputError: no two of the models merge, a model or option is unknown, or weights do not fit.
    """
    from tenuto.profiles.networks.merging.joint_network import write_joint_network

    write_joint_network({member.name: functools.partial(_built, member) for member in members}, file)


def lone_program(
    name: str, loaded: LoadedModel, options: RunOptions, batch_sizes: Sequence[int] = (), streams: Streams | None = None
) -> ProgramRunner:
    """Return a program of one model that is built already; nothing is run.

    Args:
        name: the name of the model.
        loaded: the result of `build`; its module is moved to the device.
        options: how the model is run; options that are left open are chosen for the device.
        batch_sizes: the planned batch sizes.
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
    """Move and convert weights on the stream that reads them. (On another stream, the reader would not wait for
    them.)"""
    if streams is None:
        return contextlib.nullcontext()
    import torch

    return torch.cuda.stream(streams.kernels)
