"""Text in pictures, from two networks: what the application `ocr` of workload.yaml does between detection and
recognition. It runs in processes beside the gateway.
"""

from __future__ import annotations

import functools
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, UnidentifiedImageError
from scipy import ndimage

from tenuto.errors import InvalidInputError

Array = np.ndarray[Any, Any]
Stages = Mapping[str, Sequence[Mapping[str, Array]]]

HERE = Path(__file__).parent
HEIGHT, WIDTH = 320, 640  # the largest picture that `detect` takes; its sides are multiples of 32
LINE_HEIGHT, LINE_WIDTH = 48, 640  # a line of text as `recognise` takes it
TEXT, SURE = 0.3, 0.5  # of the probability map: where text is, and the least mean of a box
GROWN = 1.6  # detection shrinks lines; PaddleOCR's ratio of growing them back


def picture(request: Mapping[str, Any], _stages: Stages) -> dict[str, Array]:
    """Return the input of `detect`: the picture of the body, no larger than it takes."""
    image = _opened(request)
    scale = min(1.0, HEIGHT / image.height, WIDTH / image.width)
    sides = [
        max(32, min(most, round(side * scale / 32) * 32))
        for side, most in zip(image.size, (WIDTH, HEIGHT), strict=True)
    ]
    return {"x": _pixels(image.resize(sides, Image.Resampling.BILINEAR))}


def crops(request: Mapping[str, Any], stages: Stages) -> list[dict[str, Array]]:
    """Return one input of `recognise` for each line of text: 48 pixels high, as wide as the line is."""
    image = _opened(request)
    lines = [image.crop(box) for box in _boxes(image, stages["detect"][0]["fetch_name_0"][0])]
    widths = [max(16, min(LINE_WIDTH, round(line.width * LINE_HEIGHT / line.height))) for line in lines]
    return [{"x": _pixels(line.resize((width, LINE_HEIGHT)))} for line, width in zip(lines, widths, strict=True)]


def text(request: Mapping[str, Any], stages: Stages) -> dict[str, Any]:
    """Return the answer: the text of each line, how sure it is, and its box (left, top, right, bottom)."""
    read = [_read(line["fetch_name_0"]) for line in stages["recognise"]]
    boxes = _boxes(_opened(request), stages["detect"][0]["fetch_name_0"][0])
    return {
        "text": [words for words, _ in read],
        "sure": np.array([sure for _, sure in read], np.float32),
        "boxes": np.array(boxes, np.int32).reshape(-1, 4),
    }


def _opened(request: Mapping[str, Any]) -> Image.Image:
    body = request["body"]
    try:
        return Image.open(io.BytesIO(body if isinstance(body, bytes) else body.item())).convert("RGB")
    except (UnidentifiedImageError, OSError) as error:
        raise InvalidInputError(f"the body is no picture ({error}). Send a PNG or a JPEG.") from error


def _pixels(image: Image.Image) -> Array:
    """Return a picture as both networks take it: blue, green, red, from -1 to 1."""
    return (np.asarray(image, np.float32)[:, :, ::-1].transpose(2, 0, 1) / 127.5 - 1.0).astype(np.float32)


def _boxes(image: Image.Image, probability: Array) -> list[tuple[int, int, int, int]]:
    """Return the boxes of lines in the picture, from top to bottom."""
    labels, _ = ndimage.label(probability > TEXT)
    boxes = []
    for number, (rows, columns) in enumerate(ndimage.find_objects(labels), 1):
        height, width = rows.stop - rows.start, columns.stop - columns.start
        if min(height, width) < 3 or probability[rows, columns][labels[rows, columns] == number].mean() < SURE:
            continue
        more = GROWN * height * width / (2 * (height + width))
        down, right = image.height / probability.shape[0], image.width / probability.shape[1]
        left, top = max(0, round((columns.start - more) * right)), max(0, round((rows.start - more) * down))
        ends = round((columns.stop + more) * right), round((rows.stop + more) * down)
        boxes.append((left, top, min(image.width, ends[0]), min(image.height, ends[1])))
    return sorted(boxes, key=lambda box: (box[1], box[0]))


def _read(probabilities: Array) -> tuple[str, float]:
    """Return the text of a line and the mean probability of its characters. Of each step the likeliest counts; the
    first class is a blank, and characters without one between them are the same one (CTC)."""
    classes, sure = probabilities.argmax(axis=1), probabilities.max(axis=1)
    is_new = (classes != 0) & (classes != np.concatenate(([0], classes[:-1])))
    words = "".join(_characters()[place - 1] for place in classes[is_new])
    return words, float(sure[is_new].mean()) if is_new.any() else 0.0


@functools.cache
def _characters() -> list[str]:
    """Return the characters that `recognise` knows, which its file lists; the last class is a space."""
    import onnxruntime

    session = onnxruntime.InferenceSession(HERE / "networks" / "recognise.onnx", providers=["CPUExecutionProvider"])
    return [*session.get_modelmeta().custom_metadata_map["character"].splitlines(), " "]
