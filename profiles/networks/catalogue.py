"""The networks that Tenuto knows by name: their source, their inputs and their outputs. No torch.

They are listed in `data/catalogue.yaml`: image classifiers of torchvision and sequence classifiers of transformers. A
model of one's own is named `package.module:factory`; the factory returns a
`LoadedModel` made here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib import resources
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from tenuto.errors import one_of, refused
from tenuto.files import parse_yaml

if TYPE_CHECKING:
    import torch

LABEL_COUNT = 2  # format: transformers' sequence classifiers built from configuration have LABEL_0 and LABEL_1


# The types of tensors that are served, by numpy's names.
DTYPES = (
    "bool",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "int8",
    "int16",
    "int32",
    "int64",
    "float16",
    "float32",
    "float64",
)
BYTES = "bytes"  # the type of tensors whose elements are strings of bytes, each of a length of its own


@dataclass(frozen=True)
class TensorSignature:
    """One input or output: numpy dtype name and shape without the batch dimension.

    `below` bounds integer inputs: every value must be in [0, below). An identifier outside an embedding table is an
    error on the CPU, and on a GPU it destroys the whole CUDA context, so it is checked before anything runs. `accepts`
    are further dtypes in which the input may come; they are converted as the first step. With the dtype `bytes`, one
    sample takes at most `most_bytes` on the wire: its elements, each with four bytes of length in front.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    below: int | None = None
    accepts: tuple[str, ...] = ()
    most_bytes: int = 1 << 20  # limit: a page of text takes a few KiB; a batch holds up to as many samples as planned

    def __post_init__(self) -> None:
        """Raise `InvalidInputError` for a type that is not served."""
        for dtype in (self.dtype, *self.accepts):
            if dtype not in DTYPES and dtype != BYTES:
                served = ", ".join((*DTYPES, BYTES))
                raise refused(f"tensor {self.name}: dtype", dtype, "is not served", f"Served: {served}.")
        if BYTES in (self.dtype, *self.accepts) and (self.below is not None or self.accepts):
            rule = "has 'below' or 'accepts', which only numbers have"
            raise refused(f"tensor {self.name}: dtype", BYTES, rule, "Leave them out.")


@dataclass(frozen=True)
class ImageInput:
    """How a picture becomes a tensor, as torchvision's `ImageClassification` preset does it.

    The shorter edge is resized to `resize_px`, the middle `crop_px` square is cut out, values are scaled to [0, 1] and
    then normalised by `mean` and `std` per RGB channel. On the wire an image is that tensor: float32, CHW. With
    `as_pixels`, pictures should be sent as uint8 (CHW, cropped), a quarter of the bytes, and are normalised on the
    device.
    """

    resize_px: int
    crop_px: int
    interpolation: Literal["bilinear", "bicubic"] = "bilinear"
    mean: tuple[float, float, float] = (0.485, 0.456, 0.406)  # format: of ImageNet's pictures
    std: tuple[float, float, float] = (0.229, 0.224, 0.225)  # format: likewise
    as_pixels: bool = False


@dataclass(frozen=True)
class TextInput:
    """How a text becomes `input_ids` and `attention_mask` of a fixed length, padded with `pad_id`.

    `prefix` and `suffix` are the identifiers a network expects around a text (BERT's [CLS] and [SEP]). Without a
    `tokenizer_path` (a local `tokenizer.json`) words are hashed into [first_word_id, vocabulary_size): deterministic,
    and honest only for random weights or for measuring.
    """

    sequence_length: int
    vocabulary_size: int
    pad_id: int
    prefix: tuple[int, ...] = ()
    suffix: tuple[int, ...] = ()
    first_word_id: int = 0
    padding_side: Literal["left", "right"] = "right"
    tokenizer_path: str | None = None


@dataclass(frozen=True)
class GenerationLimits:
    """What one sequence of a generative model may be: the most tokens of prompt and answer together, `why` no more, and
    the number of tokens that the model knows. `refuses` are fields of requests that cannot be kept, and why."""

    longest: int
    vocabulary: int
    why: str
    refuses: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class ModelSignature:
    """The inputs and outputs of a model. `kind` `tensor` means that the model takes no raw images or texts.

    `labels` names the entries of the first output, in order; empty if there are no names. A model that `generates`
    takes a prompt and writes tokens, and has neither inputs nor outputs.
    """

    kind: Literal["image", "text", "tensor"]
    inputs: tuple[TensorSignature, ...]
    outputs: tuple[TensorSignature, ...]
    image: ImageInput | None = None
    text: TextInput | None = None
    labels: tuple[str, ...] = ()
    platform: str = "pytorch"
    generates: GenerationLimits | None = None

    def __post_init__(self) -> None:
        """Raise `InvalidInputError` for a classifier with tensors of bytes."""
        if self.kind != "tensor" and self.has_bytes:
            raise refused("signature.kind", self.kind, "has a tensor of bytes", "Say `tensor`, or use other types.")

    @property
    def takes_bytes(self) -> bool:
        """Whether an input is of bytes."""
        return any(tensor.dtype == BYTES for tensor in self.inputs)

    @property
    def has_bytes(self) -> bool:
        """Whether an input or an output is of bytes."""
        return any(tensor.dtype == BYTES for tensor in (*self.inputs, *self.outputs))


@dataclass(frozen=True)
class LoadedModel:
    """A torch module in evaluation mode with its signature: what `build` and a user's own factory return.

    The module is called with one tensor per input, in the signature's order, each with a leading batch dimension, and
    returns one tensor, or a tuple of tensors in the order of the outputs. Tensors of bytes are numpy arrays of objects,
    each of them `bytes`. A row of an output must depend only on the
    same row of the inputs, because requests of different clients share a batch. If there is an `onnx_file`, it runs
    instead of the module, which is empty then.
    """

    module: torch.nn.Module
    signature: ModelSignature
    onnx_file: str | None = None


@dataclass(frozen=True)
class CatalogueEntry:
    """A network known by name. `config` has the arguments that differ from its family's defaults."""

    name: str
    source: str
    network: str
    signature: ModelSignature
    config: Mapping[str, Any]


def image_signature(image: ImageInput, classes: int, platform: str = "pytorch") -> ModelSignature:
    """Return the signature of an image classifier: `image` in, `logits` out."""
    return ModelSignature(
        kind="image",
        inputs=(TensorSignature("image", "float32", (3, image.crop_px, image.crop_px)),),
        outputs=(TensorSignature("logits", "float32", (classes,)),),
        image=image,
        platform=platform,
    )


def text_signature(text: TextInput, classes: int, platform: str = "pytorch") -> ModelSignature:
    """Return the signature of a sequence classifier: `input_ids` and `attention_mask` in, `logits` out."""
    shape = (text.sequence_length,)
    return ModelSignature(
        kind="text",
        inputs=(
            TensorSignature("input_ids", "int64", shape, below=text.vocabulary_size),
            TensorSignature("attention_mask", "int64", shape, below=2),
        ),
        outputs=(TensorSignature("logits", "float32", (classes,)),),
        text=text,
        labels=tuple(f"LABEL_{index}" for index in range(classes)),
        platform=platform,
    )


def _read(name: str, given: Mapping[str, Any]) -> CatalogueEntry:
    config = given.get("config", {})
    if "image" in given:
        signature = image_signature(msgspec.convert(given["image"], ImageInput), 1000)
        return CatalogueEntry(name, f"torchvision/{name}", given["network"], signature, config)
    signature = text_signature(msgspec.convert(given["text"], TextInput), LABEL_COUNT)
    return CatalogueEntry(name, f"transformers/{name}", given["network"], signature, config)


_DATA = resources.files("tenuto.profiles").joinpath("data", "catalogue.yaml")
CATALOGUE = {name: _read(name, given) for name, given in parse_yaml(_DATA.read_text(encoding="utf-8")).items()}


def is_factory(source: str) -> bool:
    """Return whether a source names a user's own model, `package.module:factory`."""
    module, separator, function = source.partition(":")
    return (
        bool(separator)
        and "/" not in source
        and all(part.isidentifier() for part in (*module.split("."), *function.split(".")))
    )


def is_exported(source: str) -> bool:
    """Return whether a source names a file that holds a network: a program of `torch.export`, or an ONNX model."""
    return source.endswith((".pt2", ".onnx"))


def lookup(name_or_source: str) -> CatalogueEntry:
    """Return a catalogue entry by name (`resnet50`) or source (`torchvision/resnet50`).

    Raises:
        InvalidInputError: not in the catalogue; the message suggests the nearest name and lists all.
    """
    name = name_or_source
    family, separator, rest = name_or_source.partition("/")
    if separator and family in ("torchvision", "transformers"):
        name = rest
    entry = CATALOGUE.get(name)
    if entry is not None and (not separator or entry.source == name_or_source):
        return entry
    known = [entry.source for entry in CATALOGUE.values()] if separator else sorted(CATALOGUE)
    raise refused(
        "model",
        name_or_source,
        "not in the catalogue",
        f"{one_of(name_or_source, known, 'Known:')} A model of your own is written package.module:factory, "
        "a local transformers directory by its path, an exported network as FILE.pt2 or FILE.onnx.",
    )


def with_pixels(signature: ModelSignature, *, preferred: bool) -> ModelSignature:
    """Return the signature of a model whose pictures may also come as uint8 pixels or as float16. A signature without
    pictures is returned unchanged.

    Args:
        signature: the signature of the model.
        preferred: whether pictures should be sent as pixels.
    """
    image = signature.image
    if image is None or len(signature.inputs) != 1 or signature.inputs[0].dtype != "float32":
        return signature
    picture = replace(signature.inputs[0], accepts=("uint8", "float16"))
    return replace(signature, inputs=(picture,), image=replace(image, as_pixels=preferred))


def with_sizes(
    signature: ModelSignature, *, image_size: int | None = None, sequence_length: int | None = None
) -> ModelSignature:
    """Return the signature for another image edge (pixels; the resize edge scales with it) or another text length."""
    if image_size is not None and signature.image is not None:
        old = signature.image
        resize_px = max(image_size, round(old.resize_px * image_size / old.crop_px))
        changed = image_signature(replace(old, crop_px=image_size, resize_px=resize_px), 1, signature.platform)
    elif sequence_length is not None and signature.text is not None:
        changed = text_signature(replace(signature.text, sequence_length=sequence_length), 1, signature.platform)
    else:
        return signature
    return replace(changed, outputs=signature.outputs, labels=signature.labels)
