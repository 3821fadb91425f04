"""The emulated GPU: occupies its worker thread for the latency of the plan and answers zeros, labelled as emulated.

It needs neither torch nor a GPU, so the whole stack above it, Ray and HTTP included, runs anywhere. Neighbours on the
same emulated GPU slow a batch by the factor that the plan expects. Unexpected slowness can be emulated too:
`TENUTO_EMULATED_SLOWER` names a JSON file with a further factor for each program.
"""

from __future__ import annotations

import itertools
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tenuto.deployments.gpulet.executors.busy_wait import wait_until
from tenuto.deployments.gpulet.executors.emulated_steps import EmulatedGenerator
from tenuto.deployments.serve.user_config import GeneratesEntry, MemberEntry, ProgramEntry
from tenuto.errors import InvalidInputError, refused
from tenuto.files import parse_json, read_text
from tenuto.profiles import Latency, LatencyTable
from tenuto.profiles.generation import StepCost
from tenuto.profiles.networks.catalogue import (
    BYTES,
    ModelSignature,
    SizeRange,
    TensorSignature,
    lookup,
    stated_signature,
    with_pixels,
)
from tenuto.profiles.networks.encoder_files import is_encoder, read_encoder
from tenuto.profiles.networks.generating import Generator
from tenuto.profiles.networks.inputs import Arrays, Blocks, row_sizes
from tenuto.profiles.networks.model_options import ModelOptions
from tenuto.profiles.size_classes import Sizes, class_of, in_order

_ANY_TOKEN = 2**31  # format: what takes no token as a number takes any


class _Emulated(NamedTuple):
    """A loaded program: planned l(b) by batch size, and how long a request's copies in and out take. `by_size` has l(b)
    of each size class, smallest first, by the names of the sizes."""

    latency_ms: list[float]
    copy_ms: tuple[float, float]
    signatures: dict[str, ModelSignature]
    by_size: dict[Sizes, list[float]]
    size_names: tuple[str, ...]


class EmulatedExecutor:
    """Runs batches by waiting. `device` begins with `emulated`, which every answer and report repeats."""

    def __init__(self, gpu_type: str) -> None:
        self.device = f"emulated {gpu_type}"
        self._slower = os.environ.get("TENUTO_EMULATED_SLOWER")
        self._loaded: dict[str, _Emulated] = {}
        self._generators: dict[str, EmulatedGenerator] = {}
        self._costs: dict[str, tuple[StepCost, float]] = {}  # of steps, and the slowdown by neighbours

    def load(self, program: ProgramEntry, batch_sizes: Sequence[int], prepared_file: str | None = None) -> None:
        """Take the latency from the plan, and signatures from the options or the catalogue. Nothing is built.

        Raises:
            InvalidInputError: the plan has no latency for this program, or copies take longer than a batch.
        """
        del prepared_file
        if program.generates is not None:
            self._load_generating(program, program.generates)
            return
        if program.latency is None:
            raise InvalidInputError(
                f"'{program.name}' has no latency in the plan. Make the plan again with `tenuto plan`."
            )
        signatures = {member.name: _signature(member, program) for member in program.members}
        tables = {tuple(each.sizes.values()): _table(program, each.latency, batch_sizes) for each in program.by_size}
        names = tuple(program.by_size[0].sizes) if program.by_size else ()
        by_size = {sizes: tables[sizes] for sizes in in_order(tables)}
        table = _table(program, program.latency, batch_sizes)
        copies = _copy_times_ms(program, table)
        self._loaded[program.name] = _Emulated(table, copies, signatures, by_size, names)

    def _load_generating(self, program: ProgramEntry, generates: GeneratesEntry) -> None:
        self.retime(program)

        def step_ms(prompt_tokens: int, sequences: int, context_tokens: int, pairs: int) -> float:
            cost, slowdown = self._costs[program.name]
            return self._factor(program.name) * slowdown * cost.ms(prompt_tokens, sequences, context_tokens, pairs)

        made = self._generators[program.name] = EmulatedGenerator(generates.blocks, generates.block_tokens, step_ms)
        limits = generates.limits(None, _ANY_TOKEN, made.refuses)
        signature = ModelSignature("tensor", (), (), platform="emulated", generates=limits)
        self._loaded[program.name] = _Emulated([], (0.0, 0.0), {program.name: signature}, {}, ())

    def retime(self, program: ProgramEntry) -> None:
        """Take new step costs of a program that generates, from its next step on.

        Raises:
            InvalidInputError: the plan has none.
        """
        cost = None if program.generates is None else program.generates.steps
        if cost is None:
            raise InvalidInputError(
                f"'{program.name}' has no times of its steps in the plan. Make the plan again with `tenuto plan`."
            )
        self._costs[program.name] = cost, program.slowdown

    def generator(self, program: str) -> Generator:
        """Return what runs a loaded program that generates; KeyError if there is none."""
        return self._generators[program]

    def unload(self, program: str) -> None:
        """Forget a program; one that is not loaded is ignored."""
        self._loaded.pop(program, None)
        self._generators.pop(program, None)

    def signature(self, model: str) -> ModelSignature:
        """Return the signature of a member of a loaded program; KeyError if none has it."""
        for program in self._loaded.values():
            if model in program.signatures:
                return program.signatures[model]
        raise KeyError(model)

    def run(
        self, program: str, inputs: Mapping[str, Blocks], rows: Mapping[str, int]
    ) -> tuple[dict[str, list[Arrays]], float]:
        """Wait l(batch) ms; return zeros, and the time that passed in ms."""
        started = time.perf_counter()
        sizes = {name: self.sizes(name, inputs, count) for name, count in rows.items() if count}
        wait_until(started + self.latency_ms(program, [each for mine in sizes.values() for each in mine]) / 1000.0)
        outputs = {name: self.zeros(name, mine) for name, mine in sizes.items()}
        return outputs, (time.perf_counter() - started) * 1000.0

    def sizes(self, model: str, inputs: Mapping[str, Blocks], rows: int) -> list[tuple[int, ...]]:
        """Return the sizes of every row of a batch."""
        signature = self.signature(model)
        return row_sizes(signature, inputs[model]) if signature.sizes else [()] * rows

    def zeros(self, model: str, sizes: Sequence[tuple[int, ...]]) -> list[Arrays]:
        """Return outputs of rows of these sizes, all zeros; those of bytes are empty. A size that only a run tells is
        1."""
        signature = self.signature(model)
        counts = [(own, len(list(rows))) for own, rows in itertools.groupby(sizes)]
        return [{t.name: _zeros(t, rows) for t in signature.at(own).outputs} for own, rows in counts]

    def facts(self) -> dict[str, Any]:
        """Return the programs of several models without figures, as none is really built."""
        return {name: {} for name, program in self._loaded.items() if len(program.signatures) > 1}

    def ways(self) -> dict[str, str]:
        """Return `emulated` for every program."""
        return dict.fromkeys(self._loaded, "emulated")

    def latency_ms(self, program: str, sizes: Sequence[tuple[int, ...]]) -> float:
        """Return the latency in ms of a batch of rows of these sizes, with copies and the slowdown by neighbours. It is
        padded to the smallest size class that covers all rows, or to the largest class where none does. Rows that
        cannot be padded to one size run one after the other."""
        loaded = self._loaded[program]
        if not loaded.by_size:
            return self._factor(program) * loaded.latency_ms[min(len(sizes), len(loaded.latency_ms) - 1)]
        groups: dict[Sizes, list[Sizes]] = {}
        signature, classes, total_ms = loaded.signatures[program], tuple(loaded.by_size), 0.0
        firm = [name not in signature.padded_sizes for name in signature.sizes]
        for own in sizes:
            groups.setdefault(tuple(itertools.compress(own, firm)), []).append(own)
        for rows in groups.values():
            named = dict(zip(signature.sizes, map(max, *rows, rows[0]), strict=True))
            place = class_of(classes, tuple(named.get(name, 1) for name in loaded.size_names))
            table = loaded.by_size[classes[-1 if place is None else place]]
            total_ms += table[min(len(rows), len(table) - 1)]
        return self._factor(program) * total_ms

    def _factor(self, program: str) -> float:
        """Return the unexpected slowness that is emulated."""
        return (
            1.0 if self._slower is None else float(parse_json(read_text(self._slower), self._slower).get(program, 1.0))
        )

    def copies_ms(self, program: str, batch_size: int) -> tuple[float, float]:
        """Return how many ms of that latency the copies in and out take."""
        copy_in_ms, copy_out_ms = self._loaded[program].copy_ms
        return copy_in_ms * batch_size, copy_out_ms * batch_size

    def sm_count(self) -> int | None:
        """Return None: an emulated GPU has no multiprocessors."""
        return None

    def memory_mib(self) -> float | None:
        """Return None: an emulated GPU has no memory of its own."""
        return None

    def close(self) -> None:
        """Forget all programs."""
        self._loaded.clear()
        self._generators.clear()


def _table(program: ProgramEntry, latency: Latency, batch_sizes: Sequence[int]) -> list[float]:
    """Return l(0..b) with the slowdown by neighbours, up to what is known."""
    largest = latency.largest if isinstance(latency, LatencyTable) else max(batch_sizes)
    return [0.0, *(latency.at(size) * program.slowdown for size in batch_sizes if size <= largest)]


def _zeros(tensor: TensorSignature, rows: int) -> np.ndarray[Any, Any]:
    shape = (rows, *(1 if isinstance(each, str) else each for each in tensor.shape))
    return np.full(shape, b"", object) if tensor.dtype == BYTES else np.zeros(shape, tensor.dtype)


def _copy_times_ms(program: ProgramEntry, table: Sequence[float]) -> tuple[float, float]:
    """Return `copy_in_ms` and `copy_out_ms` of one request, from the options of a lone model, else from the plan, else
    0.

    Raises:
        InvalidInputError: they are not numbers of at least 0, or they take all of some batch's latency.
    """
    options = program.members[0].options if len(program.members) == 1 else {}
    times_ms = []
    for key, planned in (("copy_in_ms", program.copy_in_ms), ("copy_out_ms", program.copy_out_ms)):
        raw = options.get(key, planned)
        value = 0.0 if raw is None else raw
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 <= value < math.inf:
            raise refused(
                f"options of {program.name}: {key}", raw, "must be ms of one request, at least 0", "Give 0 for none."
            )
        times_ms.append(float(value))
    for size, latency_ms in enumerate(table[1:], start=1):
        if sum(times_ms) * size >= latency_ms:
            raise refused(
                f"options of {program.name}: copy_in_ms + copy_out_ms",
                sum(times_ms),
                f"a batch of {size} takes {latency_ms:g} ms in all, copies included",
                "Give smaller ones.",
            )
    return times_ms[0], times_ms[1]


# The signature of a model of which only the latency is known: one number in, one number out.
_PLAIN = ModelSignature(
    "tensor", (TensorSignature("INPUT0", "float32", (1,)),), (TensorSignature("OUTPUT0", "float32", (1,)),)
)


def _signature(member: MemberEntry, program: ProgramEntry) -> ModelSignature:
    """Return `inputs`/`outputs` given in the workload's options, else those of the catalogue or of a sentence encoder's
    folder, else one number in and out; of a model planned by size, numbers in up to its largest sizes."""
    options = member.options
    if (stated := stated_signature(options, f"options of {member.name}")) is not None:
        return stated
    folder = Path(member.source or member.name)
    if is_encoder(folder):
        origin = f"options of {member.name}"
        return read_encoder(folder, ModelOptions.parse(options, origin).checked_build(origin)).signature
    try:
        return with_pixels(lookup(member.source or member.name).signature, preferred=False)
    except InvalidInputError:
        by_size = program.by_size
        if not by_size:
            return _PLAIN
        sizes = {name: SizeRange(max(each.sizes[name] for each in by_size)) for name in by_size[0].sizes}
        numbers = replace(_PLAIN.inputs[0], shape=tuple(sizes), pad=0.0 if program.pads else None)
        return replace(_PLAIN, inputs=(numbers,), sizes=sizes)
