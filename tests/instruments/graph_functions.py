"""Functions of applications of a user's own, for tests: what `map` and `outputs` may name."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tenuto.errors import InvalidInputError

Stages = Mapping[str, Sequence[Mapping[str, np.ndarray] | None]]


def copies(request: Mapping[str, Any], stages: Stages) -> Any:
    """As many requests as the second number of the input says; with a first number below 0, what that stands for."""
    first, count = (float(each) for each in request["x"])
    match first:
        case -1.0:
            raise ValueError("a secret")
        case -2.0:
            time.sleep(3600.0)
        case -3.0:
            return {"x": np.zeros(3, np.float32)}
        case -4.0:
            return [{"x": np.zeros(2, np.float32)}] * 10_000
        case -5.0:
            os._exit(9)
        case -6.0:
            raise InvalidInputError("this picture has no text. Send another one.")
        case -7.0:
            return 5
        case -8.0:
            stages["m"][0]["y"][0] = 1.0  # type: ignore[index]
        case -9.0:
            return {"y": np.zeros(2, np.float32)}
    (answer,) = stages["m"]
    assert answer is not None
    return [{"x": answer["y"] + number} for number in range(int(count))]


def first(request: Mapping[str, Any], stages: Stages) -> Any:
    """One request, of what was asked and what the stage before made of it."""
    (answer,) = stages["m"]
    assert answer is not None
    return {"x": request["x"] + answer["y"]}


def halves(request: Mapping[str, Any], stages: Stages) -> Any:
    """Two requests of what the stage before made, which differ."""
    del request
    (answer,) = stages["first"]
    assert answer is not None
    return [{"x": answer["y"]}, {"x": answer["y"] + 0.5}]


def twice(request: Mapping[str, Any], stages: Stages) -> Any:
    """Two requests of what the stage before made, of emulated models."""
    del request
    (answer,) = stages["first"]
    assert answer is not None
    return [{"INPUT0": answer["OUTPUT0"]}] * 2


def wide(request: Mapping[str, Any], stages: Stages) -> Any:
    """Two requests of long tensors, which the function cannot write where it finds them."""
    (answer,) = stages["wide"]
    assert answer is not None
    assert not answer["y"].flags.writeable
    assert not request["x"].flags.writeable
    return [{"x": answer["y"]}, {"x": answer["y"] + request["x"]}]


def length(request: Mapping[str, Any], stages: Stages) -> Any:
    """The length of the body, twice."""
    del stages
    return {"x": np.full(2, len(request["body"]), np.float32)}


def summary(request: Mapping[str, Any], stages: Stages) -> Any:
    """All kinds of outputs; a request that begins with -10 fails, with -11 it has none."""
    match float(request["x"][0]):
        case -10.0:
            raise ValueError("a secret")
        case -11.0:
            return {}
        case -12.0:
            return {"words": [1, "b"]}
    answers = [answer["y"] for answer in stages["n"] if answer is not None]
    return {
        "sums": np.array([each.sum() for each in answers], np.float32),
        "words": [f"{each[0]:g}" for each in answers],
        "raw": b"\0\xff\0",
        "text": "ü",
        "count": len(answers),
        "missing": [answer is None for answer in stages["n"]],
    }


def words(request: Mapping[str, Any], stages: Stages) -> Any:
    """Texts, numbers and the body that came."""
    answers = [answer["y"] for answer in stages["n"] if answer is not None]
    return {
        "words": [f"{each[0]:g}" for each in answers],
        "body": request["body"],
        "sums": [each.sum() for each in answers],
    }


def prompts(request: Mapping[str, Any], stages: Stages) -> Any:
    """Prompts of what the client asks for, and no prompts."""
    del stages
    match request["body"].decode():
        case "many":
            return [{"text_input": "x"}] * 10_000
        case "none":
            return {"text": "x"}
        case "empty":
            return {"text_input": ""}
        case "number":
            return {"text_input": 5}
        case "both":
            return {"text_input": "x", "input_ids": [1]}
        case "parameters":
            return {"text_input": "x", "parameters": {"max_tokens": 0}}
        case "tokens":
            return {"input_ids": np.array([65, 66]), "parameters": {"max_tokens": 3}}
        case text:
            return [{"text_input": each, "parameters": {"max_tokens": 2 + n}} for n, each in enumerate(text.split())]


def again(request: Mapping[str, Any], stages: Stages) -> Any:
    """The question, and the text that was written after it."""
    (answer,) = stages["first"]
    assert answer is not None
    return {"text_input": bytes(request["text_input"][0]) + answer["text_output"][0]}


def numbers(request: Mapping[str, Any], stages: Stages) -> Any:
    """The first two tokens that were written."""
    del request
    (answer,) = stages["first"]
    assert answer is not None
    return {"x": answer["token_ids"][:2].astype(np.float32)}
