"""The tensors of an application, composed from those of its stages' models, and where every tensor in it comes from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from tenuto.errors import Problem, one_of, raise_if_any
from tenuto.placement.application import Application, Stage
from tenuto.profiles.networks.catalogue import (
    BYTES,
    INPUT_IDS,
    PROMPT,
    TEXT_INPUT,
    ModelSignature,
    SizeRange,
    TensorSignature,
)

BODY = "body"  # the input of an application whose inputs are made by functions alone
_READ = "tokens_read"
_MOST_BODY_BYTES = 1 << 24  # limit: of that input, such as a picture


def stage_signature(stage: Stage, model: ModelSignature) -> ModelSignature:
    """Return the tensors of a stage with this model. One that generates takes a prompt, and makes a text, the tokens of
    it, and the reason for its end."""
    limits = model.generates
    if limits is None:
        return model
    taken = TensorSignature(PROMPT if stage.map is not None else TEXT_INPUT, BYTES, (1,))
    sizes: dict[str, SizeRange] = {}
    if INPUT_IDS in stage.inputs:
        taken = TensorSignature(INPUT_IDS, "int64", (_READ,), below=limits.vocabulary)
        sizes = {_READ: SizeRange(limits.longest)}
    made = (
        TensorSignature("text_output", BYTES, (1,)),
        TensorSignature("token_ids", "int64", ("tokens_written",)),
        TensorSignature("finish_reason", BYTES, (1,)),
    )
    return replace(model, inputs=(taken,), outputs=made, sizes=sizes)


class TensorSource(NamedTuple):
    """Where a tensor comes from: output `name` of the stage at this place of the application; without a stage, the
    application's own input of that name."""

    name: str
    stage: int | None = None


@dataclass(frozen=True)
class ApplicationSignature:
    """What clients send and get, as of a model, and what flows inside.

    `inputs` has the sources of each stage's inputs in the order of its model's signature; None: its `map` makes them.
    `outputs` has those of the outputs; None: a function makes them, and only a run tells what they are. `takes_body`:
    functions make all inputs, of a body of bytes, which is the only input of the application.
    """

    signature: ModelSignature
    inputs: tuple[tuple[TensorSource, ...] | None, ...]
    outputs: tuple[TensorSource, ...] | None
    takes_body: bool

    @classmethod
    def of(cls, application: Application, models: Sequence[ModelSignature]) -> ApplicationSignature:
        """Compose the tensors of an application from those of its stages (`stage_signature`).

        Raises:
            InvalidInputError: with every tensor that is missing, unknown, or does not fit where it goes.
        """
        composer = _Composer(application, models)
        sources = tuple(composer.stage_inputs(place) for place in range(len(models)))
        inputs = tuple(composer.inputs.values()) or (TensorSignature(BODY, BYTES, (1,), most_bytes=_MOST_BODY_BYTES),)
        outputs = composer.output_sources()
        specs = () if outputs is None else tuple(composer.output(name, *source) for name, source in outputs)
        raise_if_any(composer.problems)
        last = [models[composer.places[stage.label]] for stage in application.last_stages]
        labels = last[0].labels if len(last) == 1 and application.outputs is None else ()
        signature = ModelSignature("tensor", inputs, specs, labels=labels, platform="ensemble", sizes=composer.sizes)
        answered = None if outputs is None else tuple(source for _, source in outputs)
        return cls(signature, sources, answered, not composer.inputs)


class _Composer:
    """Collects the inputs of an application, with their sizes, and what does not fit."""

    def __init__(self, application: Application, models: Sequence[ModelSignature]) -> None:
        self.inputs: dict[str, TensorSignature] = {}
        self.sizes: dict[str, SizeRange] = {}
        self.problems: list[Problem] = []
        self._application, self._models = application, models
        self.places = {stage.label: place for place, stage in enumerate(application.stages)}

    def stage_inputs(self, place: int) -> tuple[TensorSource, ...] | None:
        """Return the sources of a stage's inputs."""
        stage, model = self._application.stages[place], self._models[place]
        if stage.map is not None:
            return None
        given = stage.inputs or {tensor.name: tensor.name for tensor in model.inputs}
        names = [tensor.name for tensor in model.inputs]
        for name in sorted({*given} - {*names}):
            self._refuse(stage, name, "is no input of its model", one_of(name, names, "Its inputs:"))
        for name in sorted({*names} - {*given}):
            cure = f"Name one, `inputs: {{{name}: …}}`, or make the requests in a function (map)."
            self._refuse(stage, name, "is an input of its model without a source", cure)
        return tuple(self._source(stage, model, t, given[t.name]) for t in model.inputs if t.name in given)

    def _source(self, stage: Stage, model: ModelSignature, tensor: TensorSignature, given: str) -> TensorSource:
        label, name = self._application.source_of(given) if stage.inputs else (None, given)
        if label is None:
            self._add_input(stage, model, tensor, name)
            return TensorSource(name)
        source = TensorSource(name, self.places[label])
        made = self._output_of(source, f"stages.{stage.label}.inputs.{tensor.name}")
        why = None if made is None else _misfit(made, tensor)
        if why is not None:
            self._refuse(stage, given, f"does not fit input '{tensor.name}': {why}", "Convert it in a function (map).")
        return source

    def _add_input(self, stage: Stage, model: ModelSignature, tensor: TensorSignature, name: str) -> None:
        """Take an input of the application from a stage that takes it, or hold it to what an earlier one takes."""
        known = self.inputs.get(name)
        if known is None:
            own = {d: d if d not in self.sizes else f"{stage.label}.{d}" for d in tensor.shape if isinstance(d, str)}
            self.sizes |= {own[d]: model.sizes[d] for d in own}
            shape = tuple(own[d] if isinstance(d, str) else d for d in tensor.shape)
            self.inputs[name] = replace(tensor, name=name, shape=shape)
            return
        if (why := _misfit(known, tensor)) is not None or known.axis != tensor.axis:
            rule = f"is an input of another stage as well, and does not fit this one: {why or 'another batch axis'}"
            self._refuse(stage, name, rule, "Give it another name.")
        bounds = [bound for bound in (known.below, tensor.below) if bound is not None]
        accepts = tuple(dtype for dtype in known.accepts if dtype in tensor.accepts)
        most = min(known.most_bytes, tensor.most_bytes)
        self.inputs[name] = replace(known, below=min(bounds, default=None), accepts=accepts, most_bytes=most)

    def output_sources(self) -> list[tuple[str, TensorSource]] | None:
        """Return the outputs of the application by name, with their sources."""
        application = self._application
        if isinstance(application.outputs, str):
            return None
        if application.outputs is not None:
            pairs = ((name, application.source_of(reference)) for name, reference in application.outputs.items())
            return [(name, TensorSource(output, self.places[label or ""])) for name, (label, output) in pairs]
        last = [(stage.label, self.places[stage.label]) for stage in application.last_stages]
        return [
            (tensor.name if len(last) == 1 else f"{label}.{tensor.name}", TensorSource(tensor.name, place))
            for label, place in last
            for tensor in self._models[place].outputs
        ]

    def output(self, name: str, output: str, place: int | None) -> TensorSignature:
        """Return an output of the application; that of a stage with several requests has one row for each of them."""
        assert place is not None
        made = self._output_of(TensorSource(output, place), f"outputs.{name}")
        stage = self._application.stages[place]
        if made is None:
            return TensorSignature(name, BYTES, ())
        if stage.most_requests == 1:
            return replace(made, name=name)
        return replace(made, name=name, shape=(f"{stage.label} requests", *made.shape), axis=0)

    def _output_of(self, source: TensorSource, where: str) -> TensorSignature | None:
        assert source.stage is not None
        outputs = {t.name: t for t in self._models[source.stage].outputs}
        if source.name not in outputs:
            label = self._application.stages[source.stage].label
            cure = one_of(source.name, outputs, "Its outputs:")
            self.problems.append(Problem(self._at(where), source.name, f"is no output of stage '{label}'", cure))
        return outputs.get(source.name)

    def _refuse(self, stage: Stage, value: str, rule: str, cure: str) -> None:
        self.problems.append(Problem(self._at(f"stages.{stage.label}"), value, rule, cure))

    def _at(self, where: str) -> str:
        return f"applications.{self._application.name}.{where}"


def _misfit(made: TensorSignature, taken: TensorSignature) -> str | None:
    """Return why a tensor can be no input; None where it can, as far as shapes are known."""
    if made.dtype != taken.dtype and made.dtype not in taken.accepts:
        return f"it is {made.dtype}, the input {taken.dtype}"
    pairs: Iterator[tuple[int | str, int | str]] = zip(made.shape, taken.shape, strict=False)
    if len(made.shape) != len(taken.shape) or any(type(a) is type(b) is int and a != b for a, b in pairs):
        return f"its shape is {list(made.shape)}, that of the input {list(taken.shape)}"
    return None
