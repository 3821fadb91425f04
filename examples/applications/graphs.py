"""What the applications of this folder do between their networks. It runs in processes beside the gateway.

Emulated networks answer zeros, so they find nothing. Where all scores are zero, the functions draw what there is to do
from the bytes of the request: the same request always makes the same.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Request = Mapping[str, Array]
Stages = Mapping[str, Sequence[Mapping[str, Array]]]

PERSON, VEHICLES = (1,), (3, 6, 8)  # of COCO: cars, buses, trucks
SIDE = 224  # pixels of what is recognised
MOST = 16  # `most` of the stages


def persons(request: Request, stages: Stages) -> list[dict[str, Array]]:
    """Return a picture of each person that the detector found."""
    return _cuts(request["frame"], stages["detector"][0], PERSON, mean=2.0)


def vehicles(request: Request, stages: Stages) -> list[dict[str, Array]]:
    """Return a picture of each vehicle that the detector found."""
    return _cuts(request["frame"], stages["detector"][0], VEHICLES, mean=3.0)


def seen(_request: Request, stages: Stages) -> dict[str, Any]:
    """Return how many there are, and the likeliest class of each."""
    (answers,) = (answers for label, answers in stages.items() if label != "detector")
    classes = np.array([answer["logits"].argmax() for answer in answers], np.int64)
    return {"count": np.array([len(answers)], np.int64), "classes": classes}


def foreign(request: Request, stages: Stages) -> list[dict[str, Array]]:
    """Return the text to be translated; nothing if it need not be."""
    logits = stages["language"][0]["logits"]
    is_foreign = _dice(request["text"]).random() < 0.3 if not logits.any() else logits.argmax() == 1
    return [{"input_ids": request["text"], "attention_mask": request["mask"]}] if is_foreign else []


def question(request: Request, stages: Stages) -> dict[str, str]:
    """Return a prompt that says what the detector found."""
    persons, vehicles = (
        len(_cuts(request["frame"], stages["detector"][0], *what)) for what in ((PERSON, 2.0), (VEHICLES, 3.0))
    )
    return {"text_input": f"Say in one sentence what a picture with {persons} persons and {vehicles} vehicles shows: "}


def words(_request: Request, stages: Stages) -> dict[str, Array]:
    """Return a written text as BERT reads it; each word is hashed, as Tenuto does without a tokenizer."""
    text = stages["sentence"][0]["text_output"][0]
    tokens = [101, *(999 + zlib.crc32(word) % 29_000 for word in text.split()[:126]), 102]
    ids = np.zeros(128, np.int64)
    ids[: len(tokens)] = tokens
    return {"input_ids": ids, "attention_mask": (ids > 0).astype(np.int64)}


def _cuts(frame: Array, found: Mapping[str, Array], classes: Sequence[int], mean: float) -> list[dict[str, Array]]:
    """Return the parts of a frame (colours, rows, columns) with objects of some classes."""
    scores, boxes = found["scores"], found["boxes"]
    is_sought = np.isin(found["labels"], classes) & (scores > 0.5)
    boxes = boxes[is_sought]
    if not scores.any():
        dice = _dice(frame)
        corners = np.sort(dice.uniform(0, frame.shape[1], (dice.poisson(mean), 2, 2)), axis=1)
        boxes = corners.reshape(-1, 4)
    return [{"image": _cut(frame, box)} for box in boxes[:MOST]]


def _cut(frame: Array, box: Array) -> Array:
    """Return a box (left, top, right, bottom) of a frame, scaled by taking the nearest pixels."""
    left, top, right, bottom = box.tolist()
    rows = np.linspace(top, max(bottom - 1, top), SIDE).round().astype(int).clip(0, frame.shape[1] - 1)
    columns = np.linspace(left, max(right - 1, left), SIDE).round().astype(int).clip(0, frame.shape[2] - 1)
    return np.ascontiguousarray(frame[:, rows[:, None], columns])


def _dice(tensor: Array) -> np.random.Generator:
    return np.random.default_rng(zlib.crc32(np.ascontiguousarray(tensor).view(np.uint8)))
