"""Turns a picture or a text into a model's input tensors, and logits into labels, without importing torch.

Images follow torchvision's `ImageClassification` preset on PIL images step by step, so the tensor equals torchvision's
own. Texts go through a local `tokenizer.json`, or, if there is none, through a hashing tokenizer.
"""

from __future__ import annotations

import io
import re
import warnings
import zlib
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tenuto.errors import EnvironmentFaultError, refused
from tenuto.profiles.networks.catalogue import ImageInput, ModelSignature, TextInput
from tenuto.profiles.networks.inputs import sends_pixels

Array = NDArray[Any]
Prediction = dict[str, Any]

MAX_PIXELS = 50_000_000  # limit: larger pictures would take gigabytes, so they are refused before they are decoded
_LOWER_BITS = 8  # format: of a grey value of 16 bits, those that 8 bits do not have
_ANSWERED = 5  # limit: classes of an answer; fewer if the model has fewer
_WORD = re.compile(r"\w+|[^\w\s]")


def preprocess(signature: ModelSignature, body: bytes | memoryview) -> dict[str, Array]:
    """Return the input tensors of one request, without a batch dimension, from a raw body.

    Raises:
        InvalidInputError: the body is not an image, not UTF-8 text, or empty, or the model takes only tensors.
    """
    if not len(body):
        raise refused("body", "", "is empty", "Send the bytes of an image, or a text.")
    if signature.image is not None:
        spec = signature.inputs[0]
        return {spec.name: image_tensor(body, signature.image, is_normalised=not sends_pixels(signature))}
    if signature.text is not None:
        try:
            text = bytes(body).decode("utf-8")
        except UnicodeDecodeError as error:
            raise refused(
                "body", f"byte {error.start}", "not UTF-8 text", "This model reads text; send it as UTF-8."
            ) from error
        ids, mask = text_tensors(text, signature.text)
        return {signature.inputs[0].name: ids, signature.inputs[1].name: mask}
    raise refused(
        "body",
        f"{len(body)} bytes",
        "this model takes tensors only",
        "Use POST /v2/models/{model}/infer with the tensors of its metadata.",
    )


def image_tensor(body: bytes | memoryview, image: ImageInput, *, is_normalised: bool = True) -> Array:
    """Return float32 CHW from the bytes of a JPEG or PNG: resize, centre crop, scale, normalise.

    Without `is_normalised` it ends with the crop and returns uint8 CHW, for a model that does the rest itself. Grey,
    palette and transparent pictures become RGB, and 16 bits become 8. As in torchvision, the EXIF orientation is not
    applied.

    Raises:
        InvalidInputError: the bytes are no JPEG or PNG, are damaged, or hold more than 50 million pixels.
    """
    try:
        from PIL import Image, UnidentifiedImageError
    except ModuleNotFoundError as error:
        raise EnvironmentFaultError("images need the package 'pillow'. Run: pip install 'tenuto[serve]'") from error

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # the limit below is stricter
            with Image.open(io.BytesIO(bytes(body)), formats=("JPEG", "PNG")) as opened:
                if opened.width * opened.height > MAX_PIXELS:
                    size = f"{opened.width}x{opened.height}"
                    raise refused("body", size, "has more than 50 million pixels", "Send a smaller picture.")
                if opened.mode.startswith("I"):  # grey of 16 bits: Pillow itself would cut off what is above 255
                    grey = np.asarray(opened).astype(np.uint16) >> _LOWER_BITS
                    picture = Image.fromarray(grey.astype(np.uint8)).convert("RGB")
                else:
                    picture = opened.convert("RGB")
    except UnidentifiedImageError as error:
        raise refused("body", f"{len(body)} bytes", "not an image", "Send a JPEG or PNG file as it is.") from error
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        rule = f"a damaged image ({error})"
        raise refused("body", f"{len(body)} bytes", rule, "Send a whole JPEG or PNG file.") from error
    filters = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}
    width, height = _resized(picture.width, picture.height, image.resize_px)
    crop = image.crop_px
    # torchvision rounds half to even; after resizing, no picture is smaller than the crop.
    left, top = round((width - crop) / 2.0), round((height - crop) / 2.0)
    if (width, height) != picture.size:
        picture = picture.resize((width, height), filters[image.interpolation])
    pixels = np.asarray(picture.crop((left, top, left + crop, top + crop)), dtype=np.uint8)
    planes = pixels.transpose(2, 0, 1)
    return np.ascontiguousarray(normalised(planes, image) if is_normalised else planes)


def normalised(pixels: Array, image: ImageInput) -> Array:
    """Return float32 of uint8 pixels, whose last dimensions are CHW."""
    mean = np.asarray(image.mean, np.float32)[:, None, None]
    std = np.asarray(image.std, np.float32)[:, None, None]
    answer: Array = (pixels.astype(np.float32) / np.float32(255) - mean) / std
    return answer


def _resized(width: int, height: int, shorter_px: int) -> tuple[int, int]:
    """Return the size with the shorter edge at `shorter_px`. The longer edge is rounded down, as torchvision does."""
    if width <= height:
        return shorter_px, int(shorter_px * height / width)
    return int(shorter_px * width / height), shorter_px


def text_tensors(text: str, spec: TextInput) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return `input_ids` and `attention_mask` of `spec.sequence_length`; a longer text is cut, keeping the suffix.

    Raises:
        InvalidInputError: no token is left of the text, or the tokenizer does not belong to the model.
    """
    ids = _tokenizer_ids(text, spec) if spec.tokenizer_path is not None else _hashed_ids(text, spec)
    if not ids:
        raise refused("body", text, "holds no word", "Send a text.")
    if max(ids) >= spec.vocabulary_size:
        raise refused(
            "tokenizer",
            spec.tokenizer_path,
            f"gives identifiers above the model's {spec.vocabulary_size}",
            "Use the tokenizer the model was trained with.",
        )
    row = np.full(spec.sequence_length, spec.pad_id, dtype=np.int64)
    mask = np.zeros(spec.sequence_length, dtype=np.int64)
    place = slice(spec.sequence_length - len(ids), None) if spec.padding_side == "left" else slice(len(ids))
    row[place] = ids
    mask[place] = 1
    return row, mask


def _hashed_ids(text: str, spec: TextInput) -> list[int]:
    """Map each lower-case word or sign to crc32(word) modulo the free vocabulary: the same on every machine."""
    words = _WORD.findall(text.lower())
    if not words:
        return []
    room = max(0, spec.sequence_length - len(spec.prefix) - len(spec.suffix))
    free = spec.vocabulary_size - spec.first_word_id
    reserved = {spec.pad_id, *spec.prefix, *spec.suffix}
    ids = []
    for word in words[:room]:
        identifier = spec.first_word_id + zlib.crc32(word.encode()) % free
        while identifier in reserved:
            identifier = spec.first_word_id + (identifier + 1 - spec.first_word_id) % free
        ids.append(identifier)
    return [*spec.prefix, *ids, *spec.suffix][: spec.sequence_length]


def _tokenizer_ids(text: str, spec: TextInput) -> list[int]:
    tokenizer = _open_tokenizer(str(spec.tokenizer_path), spec.sequence_length)
    # Unlike `encode` it lets go of the interpreter.
    ids: list[int] = tokenizer.encode_batch([text])[0].ids
    return ids


@lru_cache(maxsize=16)
def _open_tokenizer(path: str, length: int) -> Any:
    try:
        from tokenizers import Tokenizer
    except ModuleNotFoundError as error:
        raise EnvironmentFaultError(
            "a tokenizer.json needs the package 'tokenizers'. Run: pip install 'tenuto[serve]'"
        ) from error
    try:
        tokenizer = Tokenizer.from_file(path)
    except Exception as error:  # the library raises plain Exception for an absent or damaged file
        raise refused(
            "tokenizer", path, f"cannot be read ({error})", "Give a tokenizer.json that exists on this node."
        ) from error
    tokenizer.no_padding()
    tokenizer.enable_truncation(length)
    return tokenizer


def postprocess(signature: ModelSignature, outputs: Mapping[str, Array]) -> list[Prediction]:
    """Return the most likely classes of one request: `label`, `index`, `score` (softmax), `logit`.

    Args:
        signature: the signature of the model; a class without a name there is `class N`.
        outputs: outputs without a batch dimension; the first output of the signature is read as logits.
    """
    given = outputs[signature.outputs[0].name].reshape(-1)
    logits, names = given.astype(np.float64), signature.labels
    with np.errstate(over="ignore"):  # of a difference that no float64 has: its score is 0
        shifted = np.exp(logits - logits.max())
    scores = shifted / shifted.sum()
    return [
        {
            "label": names[index] if index < len(names) else f"class {index}",
            "index": int(index),
            "score": round(float(scores[index]), 6),
            "logit": round(given[index].item(), 6),
        }
        for index in largest(given, _ANSWERED)
    ]


def largest(values: Array, count: int) -> NDArray[np.intp]:
    """Return where the largest values are, the largest first, equal ones in order and NaN last. Values of every type
    are compared as they are: -x would turn 1 of a uint8 into 255, and float64 would make large integers equal."""
    falling = -values if values.dtype.kind == "f" else ~values
    return np.argsort(falling, kind="stable")[:count]
