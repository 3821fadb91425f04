"""Short ways to load and run a model that is a program by itself."""

from collections.abc import Mapping, Sequence
from typing import Any

from tenuto.deployments.gpulet.executors.base import Executor
from tenuto.deployments.serve.user_config import MemberEntry, ProgramEntry
from tenuto.profiles.networks.inputs import Arrays, Blocks


def lone(name: str, source: str | None = None, options: Mapping[str, Any] | None = None, **entry: Any) -> ProgramEntry:
    """An entry of one model."""
    member = MemberEntry(name=name, source=source, options=dict(options or {}))
    return ProgramEntry(name=name, members=(member,), **{"batch_size": 1, **entry})


def load(
    executor: Executor,
    name: str,
    source: str | None = None,
    options: Mapping[str, Any] | None = None,
    *,
    batch_sizes: Sequence[int] = (1,),
    **entry: Any,
) -> None:
    executor.load(lone(name, source, options, **entry), batch_sizes)


def blocks(arrays: Mapping[str, Any]) -> Blocks:
    return {name: [array] for name, array in arrays.items()}


def run(executor: Executor, name: str, arrays: Mapping[str, Any], rows: int) -> tuple[Arrays, float]:
    outputs, execution_ms = executor.run(name, {name: blocks(arrays)}, {name: rows})
    return outputs[name][0], execution_ms
