"""One request for an application over HTTP or gRPC, from its body to its response: it is parsed and answered as one for
a model, and each of its samples runs through the application's graph."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import orjson

from tenuto.deployments.dispatch.in_flight import Request
from tenuto.deployments.entry.http.exchange import JSON, BadRequestError, HttpError, refusal_of, refuse
from tenuto.deployments.entry.protocols.oip_answers import plain_values
from tenuto.deployments.entry.protocols.oip_requests import MAX_SAMPLES
from tenuto.deployments.entry.protocols.openai_answers import EVENTS, GenerateWriter, Piece, Usage
from tenuto.deployments.entry.service.infer_call import InferCall, Writer
from tenuto.deployments.entry.service.planned_application import ApplicationInterface, PlannedApplication
from tenuto.deployments.entry.service.process_pool import MOST_WAITING
from tenuto.deployments.entry.service.running_graph import RunningGraph
from tenuto.deployments.wire.answers import Refused
from tenuto.deployments.wire.status import StageRecord
from tenuto.deployments.wire.tensors import Buffer, InputPart, OutputTensor, RequestInputs
from tenuto.outcome import Outcome
from tenuto.profiles.networks.generating import Ending

_LINES = b"x-tenuto-request-id: %b\r\nx-tenuto-stages: %b\r\n"


class ApplicationCall(InferCall, eq=False):
    """A request for an application, of one or more samples; `RunningGraph` asks the models of its stages."""

    _application: PlannedApplication | None = None
    _interface: ApplicationInterface | None = None
    _graphs: list[RunningGraph] = msgspec.field(default_factory=list)  # one for each sample
    _is_streamed: bool = False
    _writer: GenerateWriter | None = None  # of a stream that has begun
    _outputs: dict[int, Sequence[OutputTensor]] = msgspec.field(default_factory=dict)  # of samples that are complete

    def begin(self) -> None:
        """Ask for what is in the body of the exchange; raises as `InferCall.begin`."""
        self.begin_parsed(self.parse(self._exchange.body, self._exchange.slot))

    def begin_decoded(
        self, samples: Sequence[RequestInputs], write: Writer | None = None, request: Buffer = b""
    ) -> None:
        """Ask for what the application's decoder made of a body, or, without a decoder, for the body itself."""
        interface = self._interface
        assert interface is not None
        if (place := interface.decoder) is not None:
            samples = [interface.decoded(place, each) for each in samples]
        super().begin_decoded(samples, write, request)

    def _start(self, samples: Sequence[Sequence[InputPart]], early: Request | None) -> None:
        del early
        exchange, service, application, interface = self._exchange, self._service, self._application, self._interface
        assert application is not None
        assert interface is not None
        stages = application.application.stages
        if self._described is not None and self._described.is_streamed and len(samples) == 1:
            self._is_streamed = interface.streamed is not None
        if self._is_streamed and len(samples) > 1:
            raise BadRequestError(f"a stream is of one sample, and this request has {len(samples)}. Send them singly.")
        requests = len(samples) * sum(each.most_requests for each in stages if not each.after and each.map is None)
        if requests > MAX_SAMPLES:
            raise BadRequestError(
                f"the samples begin {requests} requests; {MAX_SAMPLES} are the most. Send fewer samples."
            )
        if len(samples) > MOST_WAITING and any(not each.after and each.map is not None for each in stages):
            rule = f"each of {len(samples)} samples calls a function at once; {MOST_WAITING} are the most"
            raise BadRequestError(f"{rule}. Send fewer samples.")
        exchange.on_left = self._abandon
        exchange.spend(len(samples))
        name, slo_ms = service.request_id(self._id or self._route.client_id), self._slo_ms
        reserve_ms = 0.0 if self._offline else service.margin.reserve_ms(slo_ms, self._model.alone_ms)
        try:
            for parts, sizes in zip(samples, self._sizes, strict=True):
                graph = RunningGraph(
                    application,
                    interface,
                    self._dispatching,
                    self,
                    RequestInputs(list(parts), sizes),
                    arena=service.arena,
                    slot=exchange.slot,
                    body=self._body(),
                    arrived_ms=exchange.arrived_ms,
                    slo_ms=slo_ms,
                    reserve_ms=reserve_ms,
                    client_id=name,
                    yields=self._yields,
                    clock_ms=lambda: service.now_ms,
                    on_text=self._send_text if self._is_streamed else None,
                    caller=self._route.caller,
                    offline=self._offline,
                )
                self._graphs.append(graph)
        except BaseException:
            self._cancel()
            raise
        if self._is_counted:
            service.application_counters.begin_request(self._model.name, len(samples))
        for graph in self._graphs:
            if not self._is_over:
                graph.begin()

    @property
    def _is_counted(self) -> bool:
        """Whether the application counts the request: one that is not offline itself has no count of offline ones."""
        return not self._offline or self._model.offline

    def _body(self) -> InputPart | None:
        """Return the body of a request that is no tensor, for functions; None where there are none."""
        exchange = self._exchange
        if self._parsed is not None or self._interface is None or self._interface.functions is None:
            return None
        if exchange.slot is None or self._request is not exchange.body:
            return InputPart(self._request)
        return InputPart(self._request, "", exchange.slot.arena, exchange.slot.offset)

    def _abandon(self) -> None:
        """Withdraw everything: the client is gone."""
        if not self._is_over:
            if self._is_counted:
                self._service.application_counters.cancel_request(self._model.name)
            self._cancel()

    def _cancel(self) -> None:
        """Withdraw what is open."""
        self._is_over = True
        for graph in self._graphs:
            graph.withdraw()
        self._graphs = []

    def _send_text(self, text: str, token: int | None, finish: Ending | None) -> None:
        """Send a part of the text of the last stage; with the first token the stream begins."""
        writer = self._writer
        if writer is None:
            assert self._application is not None
            assert self._interface is not None
            assert self._interface.streamed is not None
            (graph,) = self._graphs
            writer = self._writer = GenerateWriter(self._model.model, graph.client_id)
            writer.tokenizer = self._application.choose(self._interface.streamed.model).tokenizer
            self._exchange.begin(200, self._lines(graph) + EVENTS)
        if text or finish is not None or writer.tokenizer is None:
            tokens = () if token is None else (token,)
            if finish is not None:
                writer.usage = Usage(self._graphs[0].prompt_tokens, self._graphs[0].tokens)
            self._exchange.send(writer.piece(0, Piece(text, tokens, None if finish is None else finish.value)))

    # --- the end (GraphAsker) -----------------------------------------------------------------------------------

    def completed(self, graph: RunningGraph, outputs: Sequence[OutputTensor]) -> None:
        """Keep the outputs of a sample, and respond when it was the last one."""
        self._outputs[self._graphs.index(graph)] = outputs
        if len(self._outputs) < len(self._graphs):
            return
        self._is_over = True
        try:
            self._count_end(graph, len(self._graphs))
            self._respond_completed(graph)
        except Exception as error:
            refuse(self._exchange, error)
        finally:
            self._graphs = []  # they hold this call

    def _respond_completed(self, graph: RunningGraph) -> None:
        """Send the outputs of all samples, with the times of the last one, or end the stream."""
        if self._is_streamed:
            if self._writer is None:  # no text was to be written
                self._send_text("", None, Ending.STOP)
            self._exchange.end()
            self._note_answer(graph)
            return
        parameters: dict[str, float | bool] = {}
        for label, stage in graph.records().items():
            parameters |= {f"{label}.{key}": getattr(stage, key) for key in StageRecord.__struct_fields__}
        parameters["emulated"] = graph.emulated
        self._write_samples(self._samples(), self._lines(graph), orjson.dumps(parameters))
        self._note_answer(graph)

    def _answered_ms(self, graph: RunningGraph) -> float:
        """Return when an answer that is there now counts as there: a stream with its first token."""
        return self._service.now_ms if math.isnan(graph.first_ms) else graph.first_ms

    def _note_answer(self, graph: RunningGraph) -> None:
        left_ms = graph.deadline_ms - self._answered_ms(graph)
        if not self._offline:
            self._service.margin.answered(left_ms, self._slo_ms, self._model.alone_ms, graph.reserve_ms)
        self._trace_graph(graph, "ok" if left_ms >= 0.0 and not graph.is_slow else "late")

    def _write_samples(self, samples: Sequence[Sequence[OutputTensor]], lines: bytes, parameters: bytes) -> None:
        """Send the outputs, those of a body that was no tensor as plain JSON."""
        if self._parsed is not None or self._write is not None:
            super()._write_samples(samples, lines, parameters)
            return
        answer = {
            "model_name": self._model.model,
            "model_version": self._model.version,
            "prediction": {each.name: plain_values(each) for each in samples[0]},
            "parameters": orjson.Fragment(parameters),
        }
        self._reply(200, lines + JSON, [orjson.dumps(answer, option=orjson.OPT_SERIALIZE_NUMPY)])

    def _samples(self) -> list[list[OutputTensor]]:
        """Return the outputs of each sample; of a stage that may be missing, only where no sample lacks it. Raises
        `HttpError` for one that the client names and that is not there."""
        samples = [self._outputs[place] for place in range(len(self._graphs))]
        names = set.intersection(*({each.name for each in sample} for sample in samples))
        requested = (self._parsed.header.outputs if self._parsed is not None else None) or ()
        missing = next((each.name for each in requested if each.name not in names), None)
        if missing is not None:
            assert self._interface is not None
            if self._interface.composed.outputs is None:
                raise HttpError(400, f"unknown output '{missing}'. The answer has: {', '.join(sorted(names))}.")
            reason = f"output '{missing}' is missing: its stage had no answer. Send the request again."
            raise HttpError(503, reason, retry_after_s=1.0)
        return [[each for each in sample if each.name in names] for sample in samples]

    def given_up(self, graph: RunningGraph, refused: Refused) -> None:
        """Refuse the request: a request with several samples has all or none."""
        if refused.outcome is Outcome.EXPIRED and not self._offline:
            self._service.gave_up(graph.arrived_ms, graph.deadline_ms, self._model.alone_ms)
        if self._is_over:
            return
        self._is_over = True
        self._count_end(graph, refused)
        if self._writer is None:
            self._refuse(refused, self._lines(graph))
        else:
            self._exchange.send(self._writer.failed(refusal_of(refused)))
            self._exchange.end()
        self._trace_graph(graph, refused.outcome.word, rule=refused.rule.value)
        self._cancel()

    def _count_end(self, graph: RunningGraph, ended: Refused | int) -> None:
        took_ms, records = self._answered_ms(graph) - graph.arrived_ms, graph.records()
        counters, name = self._service.application_counters, self._model.name
        is_late = graph.is_slow or took_ms > self._slo_ms
        about = name, graph.client_id, took_ms, records, ended, graph.lost_at
        counters.end_request(*about, is_late=is_late, is_counted=self._is_counted)

    def _trace_graph(self, graph: RunningGraph, outcome: str, **about: str) -> None:
        if self._traced is not None:
            came_ms = graph.arrived_ms
            stages = {
                label: (came_ms + each.begin_ms, came_ms + each.end_ms) for label, each in graph.records().items()
            }
            self._trace(graph.client_id, stages, outcome, **about)

    def _lines(self, graph: RunningGraph) -> bytes:
        """Return what a response says of its request and its stages, as raw header lines."""
        stages = (
            f"{label};begin={each.begin_ms:.3f};end={each.end_ms:.3f};requests={each.requests}"
            for label, each in graph.records().items()
        )
        return _LINES % (graph.client_id.encode(), ", ".join(stages).encode())
