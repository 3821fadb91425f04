"""The networks that Tenuto knows by name: their source, their inputs and their outputs. No torch.

They are listed in `data/catalogue.yaml`: image classifiers and detectors of torchvision, and sequence classifiers of
transformers. A model of one's own is named `package.module:factory`; the factory returns a
`LoadedModel` made here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import msgspec

from tenuto.errors import one_of, refused
from tenuto.files import parse_yaml

if TYPE_CHECKING:
    import torch

LABEL_COUNT = 2  # format: transformers' sequence classifiers built from configuration have LABEL_0 and LABEL_1


_STATED = ("inputs", "outputs", "sizes", "batch")  # format: the options that state a signature
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
# The inputs of a stage of an application that generates, of which it has one: a text, tokens, or what a function made,
# as JSON.
TEXT_INPUT, INPUT_IDS, PROMPT = "text_input", "input_ids", "prompt"
BYTES = "bytes"  # the type of tensors whose elements are strings of bytes, each of a length of its own


@dataclass(frozen=True)
class SizeRange:
    """The values that a dimension may have: from `least` to `most`. Inputs are padded to a multiple of `multiple`;
    where they cannot be padded, only multiples are taken."""

    most: int
    least: int = 1
    multiple: int = 1

    def __post_init__(self) -> None:
        """Raise `InvalidInputError` for a range that holds nothing, or whose end is no multiple."""
        if not 0 <= self.least <= self.most or self.multiple < 1 or self.most % self.multiple:
            rule = "must be 0 <= least <= most, with a most that is a multiple of `multiple`"
            raise refused("size", f"{self.least} to {self.most}, multiples of {self.multiple}", rule, "Correct it.")


@dataclass(frozen=True)
class TensorSignature:
    """One input or output: numpy dtype name and shape without the batch dimension.

    A dimension that is a name is a size, which varies from request to request; all dimensions of that name are equal in
    a request. An input with a `pad` may be filled up with that value to a longer size. `axis` is where the tensor has
    its batch dimension; None: it has none, and requests that share a run have equal values. `example` is the
    value in made-up requests, which measure and warm up, for networks that do not run with any number.

    `below` bounds integer inputs: every value must be in [0, below). An identifier outside an embedding table is an
    error on the CPU, and on a GPU it destroys the whole CUDA context, so it is checked before anything runs. `accepts`
    are further dtypes in which the input may come; they are converted as the first step. With the dtype `bytes`, one
    sample takes at most `most_bytes` on the wire: its elements, each with four bytes of length in front.
    """

    name: str
    dtype: str
    shape: tuple[int | str, ...]
    below: int | None = None
    accepts: tuple[str, ...] = ()
    most_bytes: int = 1 << 20  # limit: a page of text takes a few KiB; a batch holds up to as many samples as planned
    pad: float | None = None
    axis: int | None = 0
    example: float | None = None

    def __post_init__(self) -> None:
        """Raise `InvalidInputError` for a type that is not served."""
        for dtype in (self.dtype, *self.accepts):
            if dtype not in DTYPES and dtype != BYTES:
                served = ", ".join((*DTYPES, BYTES))
                raise refused(f"tensor {self.name}: dtype", dtype, "is not served", f"Served: {served}.")
        if BYTES in (self.dtype, *self.accepts) and (self.below is not None or self.accepts):
            rule = "has 'below' or 'accepts', which only numbers have"
            raise refused(f"tensor {self.name}: dtype", BYTES, rule, "Leave them out.")
        if self.axis is not None and not 0 <= self.axis <= (0 if self.dtype == BYTES else len(self.shape)):
            rule = "is no place for a batch: 0 in front, up to the number of dimensions; of bytes only 0"
            raise refused(f"tensor {self.name}: axis", self.axis, rule, "Correct it; null: it has no batch.")

    @cached_property
    def fixed_shape(self) -> tuple[int, ...]:
        """The shape of a tensor without sizes; raises `ValueError` for one that has some."""
        if any(type(dimension) is str for dimension in self.shape):
            raise ValueError(f"tensor '{self.name}' has no fixed shape, but {list(self.shape)}")
        return cast("tuple[int, ...]", self.shape)

    def at(self, sizes: Mapping[str, int]) -> TensorSignature:
        """Return the tensor in a request of these sizes; names of other sizes stay names."""
        return replace(self, shape=tuple(sizes.get(d, d) if isinstance(d, str) else d for d in self.shape))

    def shape_at(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Return the shape of an input in a request of these sizes."""
        return tuple([sizes[d] if isinstance(d, str) else d for d in self.shape])

    def takes(self, shape: Sequence[int]) -> bool:
        """Whether a request may have this shape, as far as it is fixed."""
        fixed = zip(self.shape, shape, strict=False)
        return len(shape) == len(self.shape) and all(type(d) is str or d == size for d, size in fixed)

    def whole_shape(self, rows: int | str) -> tuple[int | str, ...]:
        """Return the shape of a batch of it."""
        shape = self.shape
        return shape if self.axis is None else (*shape[: self.axis], rows, *shape[self.axis :])


@dataclass(frozen=True)
class ImageInput:
    """How a picture becomes a tensor, as torchvision's `ImageClassification` preset does it.

    The shorter edge is resized to `resize_px`, the middle `crop_px` square is cut out, values are scaled to [0, 1] and
    then normalised by `mean` and `std` per RGB channel. On the wire an image is that tensor: float32, CHW. With
    `as_pixels`, pictures should be sent as uint8 (CHW, cropped), a quarter of the bytes, and are normalised on the
    device. A picture that is not to be cropped is made such a square as a whole: `stretch` changes its proportions, and
    `pad` keeps them and fills the square with the mean, to the right or below.
    """

    resize_px: int
    crop_px: int
    interpolation: Literal["bilinear", "bicubic"] = "bilinear"
    mean: tuple[float, float, float] = (0.485, 0.456, 0.406)  # format: of ImageNet's pictures
    std: tuple[float, float, float] = (0.229, 0.224, 0.225)  # format: likewise
    as_pixels: bool = False
    fit: Literal["crop", "stretch", "pad"] = "crop"


@dataclass(frozen=True)
class TextInput:
    """How a text becomes `input_ids` and `attention_mask` of a fixed length, padded with `pad_id`.

    `prefix` and `suffix` are the identifiers a network expects around a text (BERT's [CLS] and [SEP]). Without a
    `tokenizer_path` (a local `tokenizer.json`) words are hashed into [first_word_id, vocabulary_size): deterministic,
    and honest only for random weights or for measuring. With `truncate` a longer text is cut; without, it is refused.
    """

    sequence_length: int
    vocabulary_size: int
    pad_id: int
    prefix: tuple[int, ...] = ()
    suffix: tuple[int, ...] = ()
    first_word_id: int = 0
    padding_side: Literal["left", "right"] = "right"
    tokenizer_path: str | None = None
    truncate: bool = True


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

    `labels` names the entries of the first output, in order; empty if there are no names. `answers` says what the first
    output is: the logits of classes, an embedding, how relevant a text is (`score`), the logit of that, or `boxes` in a
    picture, with their labels and scores as further outputs, the likeliest first, and rows of zeros behind the last. A
    model that `generates` takes a prompt and writes tokens, and has neither inputs nor outputs.

    `sizes` are the ranges of the sizes that the inputs name, in the order in which requests have them. Outputs may name
    further ones, which only a run tells. `batch` is the only number of rows that the network takes, if there is one.
    """

    kind: Literal["image", "text", "tensor"]
    inputs: tuple[TensorSignature, ...]
    outputs: tuple[TensorSignature, ...]
    image: ImageInput | None = None
    text: TextInput | None = None
    labels: tuple[str, ...] = ()
    platform: str = "pytorch"
    generates: GenerationLimits | None = None
    sizes: Mapping[str, SizeRange] = field(default_factory=dict)
    batch: int | None = None
    answers: Literal["classes", "embedding", "score", "logit", "boxes"] = "classes"

    def __post_init__(self) -> None:
        """Raise `InvalidInputError` for a classifier with tensors of bytes, or sizes without a range."""
        named = dict.fromkeys(each for tensor in self.inputs for each in tensor.shape if isinstance(each, str))
        if named.keys() != self.sizes.keys():
            rule = f"must be given for exactly the sizes that inputs name: {', '.join(named) or 'none'}"
            raise refused("signature.sizes", ", ".join(self.sizes) or "none", rule, "Give each its `most`.")
        if self.kind != "tensor" and self.has_bytes:
            raise refused("signature.kind", self.kind, "has a tensor of bytes", "Say `tensor`, or use other types.")

    @cached_property
    def is_plain(self) -> bool:
        """Whether all shapes are fixed, with a batch of any size in front."""
        tensors = (*self.inputs, *self.outputs)
        in_front = all(t.axis == 0 and not any(type(d) is str for d in t.shape) for t in tensors)
        return self.batch is None and in_front

    @cached_property
    def padded_sizes(self) -> frozenset[str]:
        """The sizes to which inputs may be padded: all tensors that have them can be padded or cut back."""
        firm = {d for t in self.inputs if t.pad is None for d in t.shape}
        known = all(d in self.sizes for t in self.outputs for d in t.shape if type(d) is str)
        return frozenset(self.sizes) - firm if known else frozenset()

    @cached_property
    def size_places(self) -> tuple[tuple[int, int], ...]:
        """Where each size is first named: the number of an input, and of a dimension of it."""
        places = [(d, (at, axis)) for at, tensor in enumerate(self.inputs) for axis, d in enumerate(tensor.shape)]
        first = dict(reversed(places))
        return tuple(first[name] for name in self.sizes)

    def sizes_of(self, shapes: Sequence[Sequence[int]]) -> tuple[int, ...]:
        """Return the sizes of a request from the shapes of its inputs, without batch dimensions.

        Raises:
            ValueError: a shape is none of the model's, inputs disagree on a size, or a size is out of its range.
        """
        bound: dict[str, int] = {}
        for tensor, shape in zip(self.inputs, shapes, strict=True):
            if not tensor.takes(shape):
                taken = f"[{', '.join(map(str, tensor.shape))}]"
                raise ValueError(f"input '{tensor.name}' has shape {list(shape)}; the model takes {taken}.")
            for dimension, size in zip(tensor.shape, shape, strict=True):
                if isinstance(dimension, str) and bound.setdefault(dimension, size) != size:
                    both = f"{bound[dimension]} and {size}"
                    raise ValueError(f"inputs disagree on '{dimension}': {both}. Send all of them with one size.")
        for name, allowed in self.sizes.items():
            if not allowed.least <= bound[name] <= allowed.most:
                raise ValueError(
                    f"'{name}' is {bound[name]}; the model takes {allowed.least} to {allowed.most}. Send a tensor of "
                    "such a size."
                )
            if bound[name] % allowed.multiple and name not in self.padded_sizes:
                raise ValueError(f"'{name}' is {bound[name]}; the model takes multiples of {allowed.multiple}.")
        return tuple(bound[name] for name in self.sizes)

    def at(self, sizes: Sequence[int]) -> ModelSignature:
        """Return the signature of requests of these sizes, which are fixed in it."""
        if not self.sizes:
            return self
        named = dict(zip(self.sizes, sizes, strict=True))
        inputs, outputs = (tuple(t.at(named) for t in some) for some in (self.inputs, self.outputs))
        return replace(self, inputs=inputs, outputs=outputs, sizes={})

    @property
    def most_sizes(self) -> tuple[int, ...]:
        """The largest sizes that it takes."""
        return tuple(allowed.most for allowed in self.sizes.values())

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

    The module is called with one tensor per input, in the signature's order, each with its batch dimension, and returns
    one tensor, or a tuple of tensors in the order of the outputs. Tensors of bytes are numpy arrays of objects, each of
    them `bytes`. A row of an output must depend only on the same row of the inputs, because requests of different
    clients share a batch; where inputs are padded, not on the padding either. If there is an `onnx_file`, it runs
    instead of the module, which is empty then; `onnx_data` are the files with its weights, if they are not in it.
    """

    module: torch.nn.Module
    signature: ModelSignature
    onnx_file: str | None = None
    onnx_data: tuple[str, ...] = ()


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


def detector_signature(image: ImageInput, most: int) -> ModelSignature:
    """Return the signature of a detector: `image` in, `most` `boxes` (left, top, right, bottom) with `labels` and
    `scores` out."""
    outputs = (
        TensorSignature("boxes", "float32", (most, 4)),
        TensorSignature("labels", "int64", (most,)),
        TensorSignature("scores", "float32", (most,)),
    )
    return replace(image_signature(image, 1), outputs=outputs, answers="boxes")


def text_signature(
    text: TextInput, classes: int, platform: str = "pytorch", *, has_pairs: bool = False, is_sized: bool = False
) -> ModelSignature:
    """Return the signature of a sequence classifier: `input_ids` and `attention_mask` in, `logits` out.

    Args:
        text: how a text becomes tensors.
        classes: the number of logits.
        platform: what runs it.
        has_pairs: it also takes `token_type_ids`, which are 1 for the second text of a pair.
        is_sized: each request has its own number of `tokens`, up to the length of `text`.
    """
    shape = ("tokens",) if is_sized else (text.sequence_length,)
    bounds = {"input_ids": text.vocabulary_size, "attention_mask": 2, "token_type_ids": 2}
    pads = dict.fromkeys(bounds, 0.0) | {"input_ids": float(text.pad_id)}
    inputs = tuple(
        TensorSignature(name, "int64", shape, below=below, pad=pads[name] if is_sized else None)
        for name, below in bounds.items()
    )
    return ModelSignature(
        kind="text",
        inputs=inputs if has_pairs else inputs[:2],
        outputs=(TensorSignature("logits", "float32", (classes,)),),
        text=text,
        labels=tuple(f"LABEL_{index}" for index in range(classes)),
        platform=platform,
        sizes={"tokens": SizeRange(text.sequence_length)} if is_sized else {},
    )


def _read(name: str, given: Mapping[str, Any]) -> CatalogueEntry:
    config = given.get("config", {})
    if "image" in given:
        image, source = msgspec.convert(given["image"], ImageInput), given.get("source", "torchvision")
        signature = image_signature(image, given.get("classes", 1000))
        if "most_boxes" in given:
            signature = detector_signature(image, given["most_boxes"])
        return CatalogueEntry(name, f"{source}/{name}", given["network"], signature, config)
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
    """Return whether a source names a file that holds a network: of `torch.export`, ONNX, or TorchScript."""
    return source.endswith((".pt2", ".onnx", ".pt"))


_WEIGHTS = (
    "Weights alone hold no network. Give the folder that has them beside its config.json, or give them to a network of "
    "the catalogue (--weights, weights_path) or to your own package.module:factory."
)
_TENSORFLOW = (
    "Make an ONNX file of it: pip install tensorflow tf_keras tf2onnx; TF_USE_LEGACY_KERAS=1 python -m tf2onnx.convert"
)
_ENGINE = "Give the ONNX file that it was built from, with the option runtime=tensorrt."
# What files that are not served become, or what is given in their place, by the end of their name.
_CURES_OF_FILES = {
    ".gguf": "Unpack it for transformers: tenuto add {file} --folder FOLDER",
    **dict.fromkeys((".safetensors", ".bin", ".pth"), _WEIGHTS),
    **dict.fromkeys((".jit", ".ts", ".torchscript"), "Give TorchScript a name that ends in .pt."),
    ".tflite": f"{_TENSORFLOW} --tflite {{file}} --output net.onnx",
    ".pb": f"{_TENSORFLOW} --saved-model {{folder}} --output net.onnx",
    **dict.fromkeys((".h5", ".keras"), f"{_TENSORFLOW} --keras {{file}} --output net.onnx"),
    **dict.fromkeys((".engine", ".plan", ".trt"), _ENGINE),
    **dict.fromkeys((".mlmodel", ".mlpackage", ".xml"), "Give the ONNX file of the network that it was made from."),
}


def refuse_foreign_file(source: str) -> None:
    """Raise `InvalidInputError` for a file of a kind that is not served; it says what to make of the file."""
    path = Path(source)
    if (path / "saved_model.pb").exists():
        path = path / "saved_model.pb"
    cure = _CURES_OF_FILES.get(path.suffix.lower())
    if cure is not None:
        raise refused("model", source, "is no kind of file that is served", cure.format(file=path, folder=path.parent))


def lookup(name_or_source: str) -> CatalogueEntry:
    """Return a catalogue entry by name (`resnet50`) or source (`torchvision/resnet50`).

    Raises:
        InvalidInputError: not in the catalogue; the message suggests the nearest name and lists all, or says what to
            make of a file of another kind.
    """
    refuse_foreign_file(name_or_source)
    name = name_or_source
    family, separator, rest = name_or_source.partition("/")
    if separator and family in ("torchvision", "transformers", "tenuto"):
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
        "a local transformers directory by its path, an exported network as FILE.pt2, FILE.onnx or FILE.pt.",
    )


def stated_signature(options: Mapping[str, Any], origin: str) -> ModelSignature | None:
    """Return the tensors that a model's options state, where only building its network would tell; None: they state
    none.

    Raises:
        InvalidInputError: they state what are no tensors.
    """
    if "inputs" not in options or "outputs" not in options:
        return None
    given = {"kind": "tensor", **{key: options[key] for key in _STATED if key in options}}
    try:
        return msgspec.convert(given, ModelSignature)
    except msgspec.ValidationError as error:
        cure = "Give `inputs` and `outputs` with `name`, `dtype` and `shape`."
        raise refused(origin, given, f"say no signature ({error})", cure) from error


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
    return replace(signature, inputs=changed.inputs, image=changed.image, text=changed.text)
