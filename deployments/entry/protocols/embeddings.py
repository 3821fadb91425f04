"""Questions about texts, and their answers: the vectors of texts as OpenAI's clients ask for them, documents by their
relevance as Cohere's and vLLM's do, and how relevant one text is to another as vLLM's do."""

from __future__ import annotations

import base64
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
import numpy as np
import orjson
from msgspec import Meta

from tenuto.deployments.entry.http.exchange import HttpError
from tenuto.deployments.entry.protocols.oip_requests import MAX_SAMPLES
from tenuto.deployments.entry.protocols.openai_bodies import Priority, bad_field
from tenuto.deployments.wire.tensors import Array, OutputTensor
from tenuto.errors import InvalidInputError
from tenuto.profiles.networks.catalogue import ModelSignature, TextInput
from tenuto.profiles.networks.preprocess import TextTokens, encode_texts, score_of, wrong_tokens

Samples = Sequence[Sequence[OutputTensor]]
_Texts = str | list[str]
_MOST_CHARACTERS = 4 << 20  # limit: of the pairs of a request, which repeat one text: a tokenizer takes 3 s for them


class EmbeddingBody(msgspec.Struct, forbid_unknown_fields=True):
    """The body of POST /v1/embeddings. With `truncate`, texts that are too long are cut."""

    model: str
    input: str | list[int | str | list[int]]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    user: str | None = None
    truncate: bool | None = None
    priority: Priority = None


class RerankDocument(msgspec.Struct, forbid_unknown_fields=True):
    """A document in the form that answers have."""

    text: str


class RerankBody(msgspec.Struct, forbid_unknown_fields=True):
    """The body of POST /v1/rerank, which is also Cohere's of /v2/rerank."""

    model: str
    query: str
    documents: list[str | RerankDocument]
    top_n: Annotated[int, Meta(ge=1)] | None = None
    return_documents: bool | None = None
    truncate: bool | None = None
    priority: Priority = None


class ScoreBody(msgspec.Struct, forbid_unknown_fields=True):
    """The body of POST /v1/score: one text and one or many others, or as many on both sides."""

    model: str
    text_1: _Texts
    text_2: _Texts
    truncate: bool | None = None
    priority: Priority = None


TextBody = EmbeddingBody | RerankBody | ScoreBody


class TextQuestion(NamedTuple):
    """The texts or pairs of texts that a model reads, as one sample each, and what makes the answer of the outputs of
    all samples."""

    texts: list[TextTokens]
    write: Callable[[Samples], bytes]
    offline: bool = False

    @property
    def tokens(self) -> int:
        """How many tokens the model reads."""
        return sum(len(text.ids) for text in self.texts)


def read_question(body: TextBody, model: str, signature: ModelSignature) -> TextQuestion:
    """Return what a body asks of a model. Tokenizing takes a while for long texts.

    Raises:
        HttpError: 400 if the model cannot do this, with what to change; 503 if its tokenizer cannot be read here.
    """
    text = signature.text
    if text is None or signature.answers == "classes":
        raise HttpError(400, f"'{model}' makes neither embeddings nor scores of texts. Ask /predict/MODEL.")
    try:
        return _question(body, model, signature, text)._replace(offline=body.priority is not None)
    except InvalidInputError as error:  # of the tokenizer, for which no client can do anything
        raise HttpError(503, str(error)) from None


def _question(body: TextBody, model: str, signature: ModelSignature, text: TextInput) -> TextQuestion:
    if not isinstance(body, EmbeddingBody):
        return _pairs(body, model, signature, text)
    if signature.answers != "embedding":
        raise HttpError(400, f"'{model}' makes scores of texts, and no embeddings. Ask /v1/score or /v1/rerank.")
    (width,) = signature.outputs[0].shape
    if body.dimensions not in (None, width):
        raise bad_field("dimensions", f"can only be {width} here, as the model makes so many. Leave it out")
    tokens = _inputs(body, text)
    is_packed = body.encoding_format == "base64"

    def write(samples: Samples) -> bytes:
        vectors = _first(samples)
        shown = map(_packed, vectors) if is_packed else vectors
        data = [{"object": "embedding", "index": at, "embedding": each} for at, each in enumerate(shown)]
        return _json({"object": "list", "data": data, "model": model, "usage": _usage(tokens)})

    return TextQuestion(tokens, write)


def _inputs(body: EmbeddingBody, spec: TextInput) -> list[TextTokens]:
    """Return the tokens of the input: one text, one list of tokens, or a list of either."""
    given: Sequence[Any] = [body.input]
    names = ["input"]
    if isinstance(body.input, list) and not (body.input and isinstance(body.input[0], int)):
        given, names = body.input, [f"input[{at}]" for at in range(len(body.input))]
    _check_count(len(given), "input")
    texts = [each for each in given if isinstance(each, str)]
    encoded = iter(encode_texts(texts, spec, truncate=body.truncate))
    tokens, is_cut = [], spec.truncate if body.truncate is None else body.truncate
    for name, each in zip(names, given, strict=True):
        if isinstance(each, list) and all(isinstance(token, int) for token in each):
            ids = each[: spec.sequence_length if is_cut else None]
            tokens.append(TextTokens(ids, [0] * len(ids)))
        elif isinstance(each, str):
            tokens.append(next(encoded))
        else:
            raise bad_field(name, "mixes tokens and texts. Send texts, or a list of tokens for each")
    return _checked(tokens, names, spec)


def _pairs(body: RerankBody | ScoreBody, model: str, signature: ModelSignature, spec: TextInput) -> TextQuestion:
    """Return the question how relevant texts are to others. A model of embeddings is asked for the vector of each
    text once, and the score is their cosine."""
    if isinstance(body, RerankBody):
        documents = [each if isinstance(each, str) else each.text for each in body.documents]
        pairs, names = [(body.query, each) for each in documents], [f"documents[{at}]" for at in range(len(documents))]
        _check_count(len(pairs), "documents")
    else:
        documents = []
        first, second = ([each] if isinstance(each, str) else each for each in (body.text_1, body.text_2))
        if len(first) != len(second) and len(first) != 1:
            raise bad_field("text_1", f"has {len(first)} texts, and `text_2` {len(second)}. Send one, or as many")
        pairs = list(zip(first * (len(second) if len(first) == 1 else 1), second, strict=True))
        names = [f"text_2[{at}]" for at in range(len(pairs))]
        _check_count(len(pairs), "text_2")
    if signature.answers == "embedding":
        named = {text: "query" if isinstance(body, RerankBody) else "text_1" for text, _ in pairs}
        for name, (_, text) in zip(names, pairs, strict=True):
            named.setdefault(text, name)
        tokens = _checked(encode_texts(list(named), spec, truncate=body.truncate), named.values(), spec)
        _check_count(len(tokens), names[0].partition("[")[0])
        places = {text: at for at, text in enumerate(named)}
        left, right = ([places[pair[side]] for pair in pairs] for side in (0, 1))
    else:
        characters = sum(len(first) + len(second) for first, second in pairs)
        if characters > _MOST_CHARACTERS:
            rule = f"is read with each of {len(pairs)} texts, which makes {characters} characters of {_MOST_CHARACTERS}"
            raise bad_field("query" if documents else "text_1", f"{rule}. Shorten it, or send fewer texts")
        tokens = _checked(encode_texts(pairs, spec, truncate=body.truncate), names, spec)

    def write(samples: Samples) -> bytes:
        outputs = np.stack(_first(samples)).astype(np.float64)
        if signature.answers == "embedding":
            lengths = np.linalg.norm(outputs, axis=1, keepdims=True)
            unit = outputs / np.maximum(lengths, np.finfo(np.float64).tiny)
            scores = np.sum(unit[left] * unit[right], axis=1).tolist()
        else:
            scores = [score_of(each, signature) for each in outputs[:, 0].tolist()]
        if isinstance(body, ScoreBody):
            data = [{"object": "score", "index": at, "score": score} for at, score in enumerate(scores)]
            head = {"id": f"score-{secrets.token_hex(12)}", "object": "list", "created": int(time.time())}
            return _json({**head, "model": model, "data": data, "usage": _usage(tokens)})
        order = sorted(range(len(scores)), key=lambda at: -scores[at])[: body.top_n]
        shown = [{"document": {"text": text}} if body.return_documents else {} for text in documents]
        results = [{"index": at, **shown[at], "relevance_score": scores[at]} for at in order]
        head = {"id": f"rerank-{secrets.token_hex(12)}", "model": model, "usage": _usage(tokens)}
        return _json({**head, "results": results})

    return TextQuestion(tokens, write)


def _check_count(count: int, name: str) -> None:
    if not 1 <= count <= MAX_SAMPLES:
        raise bad_field(name, f"has {count} texts, and a request may have 1 to {MAX_SAMPLES}. Send several requests")


def _checked(tokens: list[TextTokens], names: Iterable[str], spec: TextInput) -> list[TextTokens]:
    """Return tokens that the model can take; raises `HttpError` 400 with the name of the first that it cannot."""
    for name, text in zip(names, tokens, strict=True):
        rule = wrong_tokens(text, spec)
        if rule is not None:
            raise bad_field(name, rule)
    return tokens


def _first(samples: Samples) -> list[Array]:
    """Return the first output of each sample as one row of float32.

    Raises:
        HttpError: 500 if one has NaN or infinite values.
    """
    rows = [sample[0].array.reshape(-1).astype("<f4", copy=False) for sample in samples]
    for at, row in enumerate(rows):
        if not np.isfinite(row).all():
            raise HttpError(500, f"the model made NaN or infinite values of text {at}. Look at the model.")
    return rows


def _packed(vector: Array) -> orjson.Fragment:
    return orjson.Fragment(b'"%b"' % base64.b64encode(vector.data))


def _usage(texts: Sequence[TextTokens]) -> dict[str, int]:
    """Return OpenAI's `usage`."""
    tokens = sum(len(text.ids) for text in texts)
    return {"prompt_tokens": tokens, "total_tokens": tokens}


def _json(answer: dict[str, Any]) -> bytes:
    return orjson.dumps(answer, option=orjson.OPT_SERIALIZE_NUMPY)
