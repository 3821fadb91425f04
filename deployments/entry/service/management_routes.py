"""The gateway's FastAPI routes beside the infer path: server and model metadata, health, statistics, status,
documentation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response

from tenuto import __version__
from tenuto.deployments.entry.http.exchange import OPENAI, HttpError, openai_error
from tenuto.deployments.entry.protocols.embeddings import EmbeddingBody, RerankBody, ScoreBody
from tenuto.deployments.entry.protocols.oip_requests import MAX_SAMPLES, NO_SHARED_MEMORY, RequestJson, TensorSpec
from tenuto.deployments.entry.protocols.openai_bodies import ChatBody, CompletionBody, GenerateBody
from tenuto.deployments.entry.service.inference import WITHOUT_KEY, InferenceService
from tenuto.deployments.operator.app import (
    STARTING_S,
    Watched,
    add_error_answers,
    add_operator_routes,
    make_api,
    plain_error,
)
from tenuto.deployments.security.keys import Caller
from tenuto.deployments.wire.status import ModelStatus
from tenuto.placement.versions import split_name, versioned
from tenuto.profiles.networks.catalogue import BYTES


def make_app(service: InferenceService, watched: Watched | None = None) -> FastAPI:
    """Return the application with every route that does not carry load.

    `watched`: also answers operators, when clients and operators are the same people.
    """
    app = make_api("Tenuto", "Multi-model inference with latency SLOs.", _complete)

    @app.exception_handler(HttpError)
    async def _http_error(request: Request, error: HttpError) -> Response:
        lines = (line.split(": ", 1) for line in error.lines().decode("latin-1").splitlines())
        return Response(error.payload(request.url.path.encode()), error.status, dict(lines))

    add_error_answers(app, "this server", _error)

    @app.exception_handler(RequestValidationError)
    async def _invalid(_request: Request, error: RequestValidationError) -> JSONResponse:
        return JSONResponse({"error": f"invalid request: {error.errors()}"}, 400)

    @app.get("/v2", tags=["server"], summary="Server metadata")
    async def server() -> dict[str, Any]:
        return {
            "name": "tenuto",
            "version": __version__,
            "extensions": [
                "binary_tensor_data",
                "classification",
                "statistics",
                "model_repository",
                "model_configuration",
                "generate",
            ],
        }

    @app.get("/v2/health/live", tags=["server"], summary="Whether the process answers")
    async def live() -> dict[str, bool]:
        return {"live": True}

    @app.get("/health", tags=["generation"], summary="The same as /v2/health/ready, where vLLM's clients ask")
    @app.get("/v2/health/ready", tags=["server"], summary="Whether every gpu-let of the plan is connected")
    async def ready() -> dict[str, bool]:
        dispatching = service.dispatching
        if dispatching.is_ready():
            return {"ready": True}
        missing = ", ".join(gpulet.id for gpulet in dispatching.gpulets() if not gpulet.up)
        reason = f"gpu-lets not connected yet: {missing}"
        raise HttpError(503, reason, retry_after_s=STARTING_S, details={"ready": False})

    @app.get("/v2/models/stats", tags=["models"], summary="Statistics of every model of the key")
    async def all_statistics(request: Request) -> dict[str, Any]:
        models = await _all_counts(service)
        shown = [_statistics(name, counts) for name, counts in models.items() if _may_ask(request, name)]
        return {"model_stats": shown}

    @app.get("/v1/models", tags=["generation"], summary="The models of the key that OpenAI's interface can ask")
    async def written_by(request: Request) -> dict[str, Any]:
        shown = [name for name in service.models.openai_models() if _may_ask(request, name)]
        return {"object": "list", "data": [_openai(service, name) for name in shown]}

    @app.get("/v1/models/{model:path}", tags=["generation"], summary="A model that OpenAI's interface can ask")
    async def one_written_by(model: str) -> dict[str, Any]:
        if model not in service.models.openai_models():
            raise HttpError(404, f"no model '{model}' for this interface is here. GET /v1/models lists them.")
        return _openai(service, model)

    for prefix in ("/v2/models/{model}", "/v2/models/{model}/versions/{version}"):
        _add_model_routes(app, service, prefix)

    @app.post("/v2/repository/index", tags=["models"], summary="The models of the key, and whether they are ready")
    async def index(request: Request) -> list[dict[str, str]]:
        dispatching = service.dispatching
        planned = dispatching.plan.models if dispatching.plan else ()
        ready = {spec.name: dispatching.is_ready(spec.name) for spec in planned}
        ready |= {name: each.model.is_ready for name, each in service.models.applications.items()}
        return [
            {"name": model, "version": version, "state": "READY" if is_ready else "UNAVAILABLE"}
            for (model, version), is_ready in ((split_name(name), is_ready) for name, is_ready in ready.items())
            if _may_ask(request, model)
        ]

    @app.api_route("/v2/{kind}sharedmemory/{rest:path}", methods=["GET", "POST"], include_in_schema=False)
    async def shared_memory() -> None:
        raise HttpError(404, NO_SHARED_MEMORY)

    if watched is not None:
        add_operator_routes(app, watched)
    return app


def _error(path: str, text: str) -> dict[str, Any]:
    """Return an error that is about no model, in OpenAI's form where its interface was asked."""
    is_openai = path.startswith(OPENAI.decode())
    return openai_error(text, "invalid_request_error") if is_openai else plain_error(path, text)


def _openai(service: InferenceService, model: str) -> dict[str, Any]:
    """Return OpenAI's form of a model, with vLLM's `max_model_len`, and the number of tokens that the model knows."""
    signature = service.models.interface(model).signature
    told = {"id": model, "object": "model", "created": 0, "owned_by": "tenuto"}
    if signature.generates is not None:
        return {**told, "max_model_len": signature.generates.longest, "vocabulary": signature.generates.vocabulary}
    assert signature.text is not None  # it makes embeddings or scores
    return {**told, "max_model_len": signature.text.sequence_length, "vocabulary": signature.text.vocabulary_size}


def _may_ask(request: Request, model: str) -> bool:
    """Whether a model is among those of the client's key, if clients have keys; a key is for all its versions."""
    caller: Caller | None = request.scope.get("user")
    return caller is None or caller.may_ask(split_name(model)[0])


def _add_model_routes(app: FastAPI, service: InferenceService, prefix: str) -> None:
    """Add the routes of one model, or of one version of it."""
    document = "version}" not in prefix

    def named(request: Request) -> str:
        """Return the version; "" if the path names none."""
        found: str = request.path_params.get("version", "")
        return found

    @app.get(prefix, tags=["models"], summary="Model metadata", include_in_schema=document)
    async def metadata(request: Request, model: str) -> dict[str, Any]:
        interface = service.models.interface(model, named(request))
        sizes = interface.signature.sizes
        return {
            "name": model,
            "versions": service.models.versions(model),
            "platform": interface.signature.platform,
            "inputs": [t.metadata() for t in interface.inputs],
            "outputs": [t.metadata() for t in interface.outputs],
            **({"sizes": {name: asdict(allowed) for name, allowed in sizes.items()}} if sizes else {}),
        }

    @app.get(prefix + "/ready", tags=["models"], summary="Whether a model can be asked", include_in_schema=document)
    async def ready(request: Request, model: str) -> dict[str, Any]:
        try:
            service.models.interface(model, named(request))
        except HttpError as error:
            error.details = {"name": model, "ready": False}
            raise
        return {"name": model, "ready": True}

    @app.get(prefix + "/config", tags=["models"], summary="Model configuration", include_in_schema=document)
    async def config(request: Request, model: str) -> dict[str, Any]:
        interface, name = service.models.interface(model, named(request)), service.models.name(model, named(request))
        plan = service.dispatching.plan
        hosts = plan.hosts_of(name) if plan is not None else ()
        batch = max((r.batch_size for gpulet in hosts for r in gpulet.models if r.name == name), default=MAX_SAMPLES)
        # Triton's clients read a largest batch of 0 as: shapes are whole, and no batch stands in front of them.
        in_front = all(t.axis == 0 for t in (*interface.inputs, *interface.outputs))
        return {
            "name": model,
            "platform": interface.signature.platform,
            "backend": "tenuto",
            "max_batch_size": batch if in_front else 0,
            "input": [
                _config_entry(t, is_whole=not in_front)
                | ({"format": "FORMAT_NCHW"} if interface.signature.image else {})
                for t in interface.inputs
            ],
            "output": [_config_entry(t, is_whole=not in_front) for t in interface.outputs],
        }

    @app.get(prefix + "/stats", tags=["models"], summary="Statistics of a model", include_in_schema=document)
    async def statistics(request: Request, model: str) -> dict[str, Any]:
        version = named(request)
        service.models.interface(model, version)
        names = [versioned(model, each) for each in ([version] if version else service.models.versions(model))]
        models = await _all_counts(service)
        return {"model_stats": [_statistics(name, models[name]) for name in names]}


async def _all_counts(service: InferenceService) -> dict[str, ModelStatus]:
    """Return the counts of all models, and of all applications as if they were models. The latter are those of this
    gateway."""
    applications = service.application_counters.status()
    return {**(await service.dispatching.status()).models, **{name: a.as_model() for name, a in applications.items()}}


def _config_entry(tensor: TensorSpec, *, is_whole: bool) -> dict[str, Any]:
    data_type = "TYPE_STRING" if tensor.dtype == BYTES else f"TYPE_{tensor.datatype}"
    shape = tensor.wire_shape
    return {"name": tensor.name, "data_type": data_type, "dims": shape if is_whole else shape[1:]}


def _statistics(model: str, counts: ModelStatus) -> dict[str, Any]:
    """Return counts in the statistics extension's form; times are sums in ns over requests, or over batches. With
    `size_stats`, which the extension does not have, where requests vary in size."""
    answered = counts.ok + counts.late
    name, version = split_name(model)

    def summed(seconds: float) -> dict[str, int]:
        return {"count": answered, "ns": round(1e9 * seconds)}

    return {
        "name": name,
        "version": version,
        "last_inference": counts.last_ms,
        "inference_count": counts.inferences,
        "execution_count": counts.batches,
        "inference_stats": {
            "success": summed(counts.latency_s.sum),
            "fail": {"count": counts.ended - answered, "ns": round(1e6 * counts.failed_ms)},
            "queue": summed(counts.batching_s.sum + counts.gpulet_queue_s.sum),
            "compute_input": {"count": answered, "ns": 0},  # inputs are read on the way in and copied by the executor
            "compute_infer": summed(counts.execution_s.sum),
            "compute_output": {"count": answered, "ns": 0},
        },
        **({"size_stats": msgspec.to_builtins(counts.by_size)} if counts.by_size else {}),
    }


_MODEL = "/v2/models/{model}/"
_HEADERS = (
    ("X-SLO-Ms", "number", "Time allowed from arrival, in ms; the model's SLO by default."),
    ("X-Priority", "string", "`offline`: wait for time that no other request needs."),
    ("X-Request-Id", "string", "The client's name for it; echoed, and found in /requests. The body's id goes first."),
)
_TOKEN_HEADERS = (
    ("X-SLO-TTFT-Ms", "number", "Time to the first token, in ms; goes before X-SLO-Ms."),
    ("X-SLO-TPOT-Ms", "number", "Mean time for each further token, in ms; the model's SLO by default."),
)
_FAILURES = {
    400: "Malformed request; `error` says what to change.",
    404: "Unknown model.",
    406: "An output holds NaN or infinite values, which JSON has not.",
    413: "The body exceeds the limit.",
    429: "Rejected: too many requests wait; see Retry-After.",
    500: "The model raised an error for this request; the log says more under the name in `error`.",
    503: "Not ready, or the gpu-let died with the request; see Retry-After. Without it waiting does not help.",
    504: "Expired: the deadline could not be met; the request was not executed.",
}
_UNASKED = {401: "No key, or one that is not known.", 403: "The key is not for this model, or another site asks."}
_INFER = RequestJson[msgspec.Raw]
_BODIES = (_INFER, CompletionBody, ChatBody, GenerateBody, EmbeddingBody, RerankBody, ScoreBody)
_BYTES = {"schema": {"type": "string", "format": "binary"}}
_WRITTEN = "The text that was generated, whole or as server-sent events."
_TEXT_PATHS = (
    ("/v1/completions", "complete", CompletionBody, "A text that goes on, as OpenAI's interface has it", _WRITTEN),
    ("/v1/chat/completions", "chat", ChatBody, "The next message of a chat, as OpenAI's interface has it", _WRITTEN),
    (
        "/v1/embeddings",
        "embed",
        EmbeddingBody,
        "The vectors of texts, as OpenAI's interface has them",
        "A vector of each.",
    ),
    ("/v1/rerank", "rerank", RerankBody, "Documents by their relevance to a query", "The most relevant first."),
    ("/v2/rerank", "rerank_v2", RerankBody, "Documents by their relevance to a query", "The most relevant first."),
    ("/v1/score", "score", ScoreBody, "How relevant texts are to others, as vLLM has it", "A score of each pair."),
    (_MODEL + "generate", "generate", GenerateBody, "A text that goes on, by the generate extension", _WRITTEN),
    (_MODEL + "generate_stream", "generate_stream", GenerateBody, "The same, as server-sent events", _WRITTEN),
)


def _complete(document: dict[str, Any]) -> None:
    """Add the paths that carry load, and which paths need a key when clients have keys."""
    bodies, schemas = msgspec.json.schema_components(_BODIES, ref_template="#/components/schemas/{name}")
    document["paths"].update(_hot_paths(dict(zip(_BODIES, bodies, strict=True))))
    components = document.setdefault("components", {})
    components.setdefault("schemas", {}).update(schemas)
    components["securitySchemes"] = {
        "bearer": {"type": "http", "scheme": "bearer"},
        "key": {"type": "apiKey", "in": "header", "name": "X-Api-Key"},
    }
    document["security"] = [{"bearer": []}, {"key": []}, {}]  # none where clients have no keys
    for path, methods in document["paths"].items():
        for operation in methods.values():
            if path.encode().startswith(WITHOUT_KEY):
                operation["security"] = []
            else:
                operation["responses"] |= {str(status): {"description": text} for status, text in _UNASKED.items()}


def _hot_paths(bodies: Mapping[Any, Any]) -> dict[str, Any]:
    """Return the documentation of the paths that carry load, which are answered elsewhere.

    `bodies`: the schema of each type of body.
    """

    def post(path: str, name: str, summary: str, taken: Mapping[str, Any], answer: str) -> dict[str, Any]:
        model = {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}
        headers = [
            {"name": header, "in": "header", "required": False, "schema": {"type": kind}, "description": text}
            for header, kind, text in _HEADERS + (_TOKEN_HEADERS if answer is _WRITTEN else ())
        ]
        told = {str(status): {"description": text} for status, text in {200: answer, **_FAILURES}.items()}
        body, parameters = {"required": True, "content": taken}, [model, *headers] if "{model}" in path else headers
        about = {"tags": ["inference"], "operationId": name, "summary": summary, "parameters": parameters}
        return {"post": {**about, "requestBody": body, "responses": told}}

    tensors = {"application/json": {"schema": bodies[_INFER]}, "application/octet-stream": _BYTES}
    raw = {"image/jpeg": _BYTES, "image/png": _BYTES, "text/plain": {"schema": {"type": "string"}}}
    infer = "Open Inference Protocol v2 inference, JSON or binary tensors", tensors
    predict = "A raw image or plain text in; labels, a vector or a score out", raw
    paths = [
        (_MODEL + "infer", "infer", *infer, "Outputs; times and batch size in parameters."),
        ("/predict/{model}", "predict", *predict, "The most likely labels with scores, or what else the model makes."),
    ]
    for path, name, body, summary, answer in _TEXT_PATHS:
        paths.append((path, name, summary, {"application/json": {"schema": bodies[body]}}, answer))
    return {each[0]: post(*each) for each in paths}
