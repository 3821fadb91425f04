"""Turns a picture or a text into a model's input tensors, and logits into labels, without importing torch.

Images follow torchvision's `ImageClassification` preset on PIL images step by step, so the tensor equals torchvision's
own. Texts go through a local `tokenizer.json`, or, if there is none, through a hashing tokenizer.
"""

from __future__ import annotations

import io
import math
import re
import warnings
import zlib
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tenuto.errors import EnvironmentFaultError, refused
from tenuto.profiles.networks.catalogue import ImageInput, ModelSignature, TextInput
from tenuto.profiles.networks.inputs import sends_pixels

Array = NDArray[Any]

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
        (tokens,) = encode_texts([text], signature.text)
        rule = wrong_tokens(tokens, signature.text)
        if rule is not None:
            raise refused("body", f"{len(text)} characters", rule, "Send another text.")
        (arrays,) = text_arrays([tokens], signature)
        return dict(zip([tensor.name for tensor in signature.inputs], arrays, strict=True))
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
    pixels = np.asarray(_fitted(picture, image), dtype=np.uint8)
    planes = pixels.transpose(2, 0, 1)
    return np.ascontiguousarray(normalised(planes, image) if is_normalised else planes)


def _fitted(picture: Any, image: ImageInput) -> Any:
    """Return a picture of Pillow's as the square that a network takes.

    Raises:
        InvalidInputError: it would be too large before it is cropped, as it is narrow.
    """
    from PIL import Image

    filters = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}
    edge = image.crop_px
    if image.fit == "crop":
        width, height = _resized(picture.width, picture.height, image.resize_px)
        if width * height > MAX_PIXELS:
            size, cure = f"{picture.width}x{picture.height}", "Send a part of it that is less narrow."
            raise refused("body", size, f"has more than 50 million pixels as {width}x{height}", cure)
    else:
        width, height = _whole_size(picture.width, picture.height, image)
    if (width, height) != picture.size:
        picture = picture.resize((width, height), filters[image.interpolation])
    if image.fit == "crop":
        # torchvision rounds half to even; after resizing, no picture is smaller than the crop.
        left, top = round((width - edge) / 2.0), round((height - edge) / 2.0)
        return picture.crop((left, top, left + edge, top + edge))
    whole = Image.new("RGB", (edge, edge), tuple(round(255 * mean) for mean in image.mean))  # format: of a pixel
    whole.paste(picture, (0, 0))
    return whole


def _whole_size(width: int, height: int, image: ImageInput) -> tuple[int, int]:
    """Return the size in which a whole picture lies in its square."""
    if image.fit == "stretch":
        return image.crop_px, image.crop_px
    longer = max(width, height)
    return max(1, round(width * image.crop_px / longer)), max(1, round(height * image.crop_px / longer))


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


class TextTokens(NamedTuple):
    """The tokens of a text or of a pair of texts. `types` are 1 for those of the second text."""

    ids: list[int]
    types: list[int]


def encode_texts(
    texts: Sequence[str] | Sequence[tuple[str, str]], spec: TextInput, *, truncate: bool | None = None
) -> list[TextTokens]:
    """Return the tokens of texts, or of pairs of texts. With `truncate`, which `spec` has if it is None, texts are cut
    to `spec.sequence_length`, keeping the suffix.

    Raises:
        InvalidInputError: the tokenizer cannot be read.
    """
    length = spec.sequence_length if (spec.truncate if truncate is None else truncate) else None
    if spec.tokenizer_path is None or not texts:
        return [_hashed(text, spec, length) for text in texts]
    encodings = open_tokenizer(spec.tokenizer_path, length).encode_batch_fast(list(texts))  # lets go of the interpreter
    return [TextTokens(each.ids, each.type_ids) for each in encodings]


def wrong_tokens(tokens: TextTokens, spec: TextInput) -> str | None:
    """Return what is wrong with tokens, as the end of a sentence about their text; None if the model can take them."""
    if not tokens.ids:
        return "holds no word"
    if len(tokens.ids) > spec.sequence_length:
        return (
            f"has {len(tokens.ids)} tokens, and the model takes {spec.sequence_length}. Shorten it, or have it cut "
            "with `truncate: true`"
        )
    low, high = min(tokens.ids), max(tokens.ids)
    if low < 0 or high >= spec.vocabulary_size:
        known = f"the model knows 0 to {spec.vocabulary_size - 1}. Use the model's own tokenizer"
        return f"has token {low if low < 0 else high}; {known}"
    return None


def text_arrays(texts: Sequence[TextTokens], signature: ModelSignature) -> list[list[Array]]:
    """Return the tensors of texts that are not too long, in the order of the inputs: their tokens, which of them are
    attended, and their types. Texts are padded where the model has no size for their length."""
    spec = signature.text
    assert spec is not None
    found = []
    for ids, types in texts:
        length = len(ids) if signature.sizes else spec.sequence_length
        place = slice(length - len(ids), None) if spec.padding_side == "left" else slice(len(ids))
        arrays = []
        for tensor, padding, values in zip(signature.inputs, (spec.pad_id, 0, 0), (ids, 1, types), strict=False):
            array = np.full(length, padding, tensor.dtype)
            array[place] = values
            arrays.append(array)
        found.append(arrays)
    return found


def _hashed(text: str | tuple[str, str], spec: TextInput, length: int | None) -> TextTokens:
    """Map each lower-case word or sign to crc32(word) modulo the free vocabulary: the same on every machine."""
    parts = [_WORD.findall(part.lower()) for part in ((text,) if isinstance(text, str) else text)]
    if not any(parts):
        return TextTokens([], [])
    free = spec.vocabulary_size - spec.first_word_id
    reserved = {spec.pad_id, *spec.prefix, *spec.suffix}
    room = sum(map(len, parts))
    if length is not None:
        room = max(0, length - len(spec.prefix) - len(parts) * len(spec.suffix))
    ids, types = list(spec.prefix), [0] * len(spec.prefix)
    for number, words in enumerate(parts):
        for word in words[:room]:
            identifier = spec.first_word_id + zlib.crc32(word.encode()) % free
            while identifier in reserved:
                identifier = spec.first_word_id + (identifier + 1 - spec.first_word_id) % free
            ids.append(identifier)
        room -= len(words[:room])
        ids += spec.suffix
        types += [number] * (len(ids) - len(types))
    return TextTokens(ids[:length], types[:length])


@lru_cache(maxsize=16)
def open_tokenizer(path: str, length: int | None) -> Any:
    """Return the tokenizer of a file, which cuts texts to `length` tokens if that is not None.

    Raises:
        InvalidInputError: there is none.
        EnvironmentFaultError: the package `tokenizers` is not installed.
    """
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
    if length is None:
        tokenizer.no_truncation()
    else:
        tokenizer.enable_truncation(length)
    return tokenizer


def postprocess(signature: ModelSignature, outputs: Mapping[str, Array], request: bytes = b"") -> Any:
    """Return the answer to one request. Of classes it is the most likely ones: `label`, `index`, `score` (softmax),
    `logit`; of other models their `embedding`, the `score` of a text, or each `box` in a picture with its `label`,
    `index` and `score`.

    Args:
        signature: the signature of the model; a class without a name there is `class N`.
        outputs: outputs without a batch dimension; the first output of the signature is read, of a detector all.
        request: the picture that a detector was sent.
    """
    if signature.answers == "boxes":
        return _boxes(signature, outputs, request)
    given = outputs[signature.outputs[0].name].reshape(-1)
    if signature.answers == "embedding":
        return {"embedding": given}
    if signature.answers != "classes":
        return {"score": score_of(given.item(), signature)}
    logits = given.astype(np.float64)
    with np.errstate(over="ignore"):  # of a difference that no float64 has: its score is 0
        shifted = np.exp(logits - logits.max())
    scores = shifted / shifted.sum()
    return [
        {
            "label": _name(signature, index),
            "index": int(index),
            "score": round(float(scores[index]), 6),
            "logit": round(given[index].item(), 6),
        }
        for index in largest(given, _ANSWERED)
    ]


def _name(signature: ModelSignature, index: int) -> str:
    return signature.labels[index] if index < len(signature.labels) else f"class {index}"


def _boxes(signature: ModelSignature, outputs: Mapping[str, Array], request: bytes) -> list[dict[str, Any]]:
    """Return the boxes that have a score, in pixels of the client's picture: left, top, right, bottom."""
    from PIL import Image

    image = signature.image
    assert image is not None  # detectors take pictures
    with Image.open(io.BytesIO(request), formats=("JPEG", "PNG")) as opened:  # its pixels are not read
        sent = opened.size
    sides = np.array(sent, np.float64)
    boxes, labels, scores = (outputs[tensor.name] for tensor in signature.outputs)
    placed = boxes.astype(np.float64).reshape(-1, 2, 2) * sides / _whole_size(*sent, image)
    placed = np.clip(placed, 0.0, sides)
    has_area = (placed[:, 1] > placed[:, 0]).all(axis=1)
    return [
        {
            "label": _name(signature, int(labels[at])),
            "index": int(labels[at]),
            "score": round(float(scores[at]), 6),
            "box": placed[at].reshape(-1).round(2).tolist(),
        }
        for at in np.flatnonzero((scores > 0) & has_area)
    ]


def score_of(given: float, signature: ModelSignature) -> float:
    """Return how relevant a text is by the one output of its model."""
    return 0.5 * (1.0 + math.tanh(0.5 * given)) if signature.answers == "logit" else float(given)


def largest(values: Array, count: int) -> NDArray[np.intp]:
    """Return where the largest values are, the largest first, equal ones in order and NaN last. Values of every type
    are compared as they are: -x would turn 1 of a uint8 into 255, and float64 would make large integers equal."""
    falling = -values if values.dtype.kind == "f" else ~values
    return np.argsort(falling, kind="stable")[:count]
