"""An application as the gateway sees it: its graph, the tensors that clients send and get, and whether all its stages
can be asked."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from tenuto.batching.applications.application_graph import ApplicationGraph, GraphStage
from tenuto.batching.applications.stage_times import StageTimes
from tenuto.deployments.entry.http.exchange import BadRequestError
from tenuto.deployments.entry.service.function_pool import FunctionPool
from tenuto.deployments.entry.service.planned_model import PlannedModel
from tenuto.deployments.entry.service.traffic_split import ShadowCopies, Shadows
from tenuto.deployments.wire.tensors import Buffer, InputPart, RequestInputs, pack_elements
from tenuto.errors import InvalidInputError
from tenuto.placement.application import Application
from tenuto.placement.application_signature import ApplicationSignature, stage_signature
from tenuto.profiles.networks.catalogue import BYTES, INPUT_IDS, ModelSignature
from tenuto.profiles.networks.model_options import HookOptions


@dataclass(frozen=True)
class ApplicationInterface:
    """The tensors of an application and of its stages, by what gpu-lets reported of their models.

    `handed_on`: the outputs of each stage that others take as inputs, or that functions see. `before`: the stages that
    each stage waits for, and those that these wait for. `functions`: None where it has none.
    """

    application: Application
    graph: ApplicationGraph
    stages: tuple[ModelSignature, ...]
    composed: ApplicationSignature
    handed_on: tuple[frozenset[str], ...]
    before: tuple[tuple[int, ...], ...]
    functions: FunctionPool | None

    @classmethod
    def of(
        cls, application: Application, graph: ApplicationGraph, stages: tuple[ModelSignature, ...]
    ) -> ApplicationInterface:
        """Compose it, and start its functions; raises `InvalidInputError` if the tensors do not fit."""
        composed = ApplicationSignature.of(application, stages)
        before: dict[int, frozenset[int]] = {}
        for place in graph.order:
            before[place] = frozenset(graph.stages[place].before).union(
                *(before[b] for b in graph.stages[place].before)
            )
        taken = [source for sources in composed.inputs for source in sources or ()]
        seen = {b for place, sources in enumerate(composed.inputs) if sources is None for b in before[place]}
        handed_on = (
            frozenset(output.name for output in stages[place].outputs)
            if place in seen or composed.outputs is None
            else frozenset(source.name for source in taken if source.stage == place)
            for place in range(len(stages))
        )
        ordered = (tuple(sorted(before[place])) for place in range(len(stages)))
        has_functions = composed.outputs is None or None in composed.inputs
        functions = FunctionPool(application, stages) if has_functions else None
        return cls(application, graph, stages, composed, tuple(handed_on), tuple(ordered), functions)

    @property
    def decoder(self) -> int | None:
        """The stage whose model makes all inputs of the application of a picture or a text; None if no stage does."""
        names = {tensor.name for tensor in self.composed.signature.inputs}
        for place, sources in enumerate(self.composed.inputs):
            if self.stages[place].generates is not None and INPUT_IDS in self.application.stages[place].inputs:
                continue
            if sources and all(each.stage is None for each in sources) and {each.name for each in sources} == names:
                return place
        return None

    @property
    def streamed(self) -> GraphStage | None:
        """The stage whose text is streamed; None if there is none."""
        return next((stage for stage in self.graph.stages if stage.is_streamed), None)

    def decoded(self, place: int, sample: RequestInputs) -> RequestInputs:
        """Return the inputs of the application of those of the stage that is its decoder."""
        tensors, sources = self.stages[place].at(sample.sizes).inputs, self.composed.inputs[place] or ()
        parts = {each.name: part for each, part in zip(sources, sample.parts, strict=True)}
        shapes = {each.name: tensor.fixed_shape for each, tensor in zip(sources, tensors, strict=True)}
        names = [tensor.name for tensor in self.composed.signature.inputs]
        sizes = self.composed.signature.sizes_of([shapes[name] for name in names])
        return RequestInputs([parts[name] for name in names], sizes)


class PlannedApplication:
    """An application of the plan, for requests. `model` is what they ask, as if it were a model; `interface`: None
    before all models of its stages are known. `problem`: why it cannot be asked now, empty if it can; `retry_after_s`:
    when it may be asked again, None where its models do not fit."""

    def __init__(
        self,
        application: Application,
        times: StageTimes,
        choose: Callable[[str], PlannedModel],
        shadows_of: Callable[[str], Shadows],
        copies: ShadowCopies,
    ) -> None:
        """Take the entry in the plan. One with functions needs a running event loop.

        Args:
            application: the entry.
            times: what is known of how long stages take.
            choose: returns the version of a stage's model that a request asks.
            shadows_of: returns the versions of it that get copies.
            copies: sends these.
        """
        self.application, self.times, self.choose = application, times, choose
        self.shadows_of, self.copies = shadows_of, copies
        self.graph = ApplicationGraph.of(application)
        self.model = PlannedModel(application.name)
        self.model.offline = application.offline
        self.interface: ApplicationInterface | None = None
        self.decoder: PlannedModel | None = None  # whose hooks make its inputs of a picture or a text
        self.problem = ""
        self.retry_after_s: float | None = None

    def follow(self, model_of: Callable[[str], PlannedModel]) -> None:
        """Take the present state of the models of its stages, and what they take at least."""
        stages = self.graph.stages
        models = [model_of(stage.model) for stage in stages]
        self._compose([model.interface.signature for model in models if model.interface is not None])
        away = [stage.label for stage, model in zip(stages, models, strict=True) if not model.is_ready]
        if away:
            at = f"{'stage' if len(away) == 1 else 'stages'} {', '.join(away)} of '{self.model.name}'"
            self.problem = f"no gpu-let of {at} is ready. Retry in a few seconds."
        self.retry_after_s = 2.0 if away else None
        place = None if self.interface is None else self.interface.decoder
        self.decoder = None if place is None or self._generates(place) else models[place]
        least_ms = [self.times.least_ms(stage.model) for stage in stages]
        alone_ms = max(map(sum, zip(least_ms, self.graph.longest_behind(least_ms), strict=True)))
        signature = None if self.interface is None else self.interface.composed.signature
        self.model.ttft_ms = self.application.slo_ms if self.application.streams else math.inf
        self.model.follow(self.application.slo_ms, alone_ms, signature, HookOptions(), is_ready=not self.problem)

    def take_body(self, body: Buffer) -> RequestInputs:
        """Return the inputs of an application of which a function reads the body, or whose body is a prompt; raises
        `BadRequestError` for others."""
        place = None if self.interface is None else self.interface.decoder
        if self.interface is None or not (
            self.interface.composed.takes_body or (place is not None and self._generates(place))
        ):
            rule = "no stage of it makes all its inputs of a body"
            raise BadRequestError(f"'{self.model.name}' takes tensors: {rule}. Ask /v2/models/MODEL/infer.")
        return RequestInputs([InputPart(pack_elements([bytes(body)]), BYTES)])

    def _generates(self, place: int) -> bool:
        return self.interface is not None and self.interface.stages[place].generates is not None

    def retire(self) -> None:
        """End the functions when no request that began with them is under way any more."""
        if self.interface is not None and self.interface.functions is not None:
            self.interface.functions.release()
        self.interface = None

    def close(self) -> None:
        """End the functions, with the requests that wait for them."""
        if self.interface is not None and self.interface.functions is not None:
            self.interface.functions.close()

    def _compose(self, known: list[ModelSignature]) -> None:
        """Compose the tensors anew if all models are known and one has changed."""
        self.problem = ""
        if len(known) < len(self.graph.stages):
            return
        signatures = tuple(map(stage_signature, self.application.stages, known))
        if self.interface is not None and self.interface.stages == signatures:
            return
        self.retire()
        try:
            self.interface = ApplicationInterface.of(self.application, self.graph, signatures)
        except InvalidInputError as error:
            self.problem = f"'{self.model.name}' does not fit its models: {error}"
