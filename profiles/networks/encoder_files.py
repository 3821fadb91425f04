"""What the files of a sentence encoder's folder say: its network, what becomes of the network's outputs, its texts.

Such a folder has a `modules.json`, which names a network of transformers, pooling, and then dense layers or a
normalisation. No torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from tenuto.errors import InvalidInputError, one_of, refused
from tenuto.files import parse_json, read_text
from tenuto.profiles.networks.catalogue import ModelSignature, TensorSignature, TextInput, text_signature
from tenuto.profiles.networks.model_options import BuildOptions
from tenuto.profiles.networks.tokenizer_files import tokenizer_file, tokenizer_place

T = TypeVar("T")

_MODULES = "modules.json"  # format: of a folder of the package sentence-transformers, as are the keys below
_POOLINGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_ACTIVATIONS = ("Identity", "Tanh", "ReLU", "GELU", "Sigmoid")
# Networks whose positions begin behind the number of the padding token.
_POSITIONS_BEHIND_PAD = ("roberta", "xlm-roberta", "xlm-roberta-xl", "camembert", "mpnet")
_DEFAULT_TOKENS = 128  # default: tokens of a text, where neither options nor files say


class _Module(msgspec.Struct):
    type: str
    path: str = ""


class _Pooling(msgspec.Struct):
    embedding_dimension: int
    pooling_mode: str | list[str] = "mean"
    include_prompt: bool = True


class DenseFiles(msgspec.Struct):
    """A dense layer behind the pooling. `activation_function` is the name of a class of torch."""

    in_features: int
    out_features: int
    bias: bool = True
    activation_function: str = "torch.nn.modules.activation.Tanh"
    weights: str = ""  # not in the file: where they are

    @property
    def activation(self) -> str:
        """The name of the class in `torch.nn`."""
        return self.activation_function.rpartition(".")[2]


class _Texts(msgspec.Struct):
    max_seq_length: int | None = None
    do_lower_case: bool = False


class _Prompts(msgspec.Struct):
    default_prompt_name: str | None = None


class _Network(msgspec.Struct):
    vocab_size: int
    model_type: str = ""
    pad_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    max_position_embeddings: int | None = None


@dataclass(frozen=True)
class EncoderFiles:
    """A sentence encoder: the folder of its network, the ways of pooling, whose outputs are joined, and the layers
    behind them, of which None normalises."""

    network: Path
    poolings: tuple[str, ...]
    layers: tuple[DenseFiles | None, ...]
    signature: ModelSignature


def is_encoder(folder: Path) -> bool:
    """Return whether a folder says that it is a sentence encoder."""
    return (folder / _MODULES).exists()


def read_encoder(folder: Path, options: BuildOptions) -> EncoderFiles:
    """Return what the files of a sentence encoder say.

    Raises:
        InvalidInputError: a file is missing or damaged, it has a module that is not known here, or no tokenizer.
    """
    modules = _read(folder / _MODULES, list[_Module])
    kinds = [module.type.rpartition(".")[2] for module in modules]
    if kinds[:2] != ["Transformer", "Pooling"]:
        raise _unknown(
            folder, kinds, "Only `Transformer`, `Pooling`, `Dense` and `Normalize` are known, in this order."
        )
    network, pooling = folder / modules[0].path, _pooling(folder / modules[1].path / "config.json")
    poolings = (pooling.pooling_mode,) if isinstance(pooling.pooling_mode, str) else tuple(pooling.pooling_mode)
    unknown = set(poolings) - set(_POOLINGS.values())
    if unknown:
        raise _unknown(folder, min(unknown), one_of(min(unknown), _POOLINGS.values()))
    if not pooling.include_prompt:
        raise _unknown(folder, "include_prompt: false", "Serve it by a factory of your own.")
    width = pooling.embedding_dimension * len(poolings)
    layers: list[DenseFiles | None] = []
    for kind, module in zip(kinds[2:], modules[2:], strict=True):
        if kind == "Normalize":
            layers.append(None)
        elif kind == "Dense":
            dense = _dense(folder / module.path)
            if dense.in_features != width:
                raise _unknown(folder, dense.in_features, f"The layer before it has {width} outputs.")
            width = dense.out_features
            layers.append(dense)
        else:
            raise _unknown(folder, kind, "Serve it by a factory of your own.")
    text = _text(folder, network, options)
    signature = replace(
        text_signature(text, 1, is_sized=options.sequence_length is None),
        outputs=(TensorSignature("embedding", "float32", (width,)),),
        labels=(),
        answers="embedding",
    )
    return EncoderFiles(network, poolings, tuple(layers), signature)


def _pooling(file: Path) -> _Pooling:
    """Return the settings of pooling, of which older files say each way by itself."""
    given = _read(file, dict[str, Any])
    ways = [way for key, way in _POOLINGS.items() if given.get(key)]
    if any(key in given for key in _POOLINGS):
        given.setdefault("pooling_mode", ways or "mean")
    given.setdefault("embedding_dimension", given.get("word_embedding_dimension"))
    return _converted(file, given, _Pooling)


def _dense(folder: Path) -> DenseFiles:
    dense = _read(folder / "config.json", DenseFiles)
    if dense.activation not in _ACTIVATIONS:
        raise _unknown(folder, dense.activation_function, one_of(dense.activation, _ACTIVATIONS))
    names = ("model.safetensors", "pytorch_model.bin")
    dense.weights = str(next((folder / name for name in names if (folder / name).exists()), folder / names[0]))
    return dense


def _text(folder: Path, network: Path, options: BuildOptions) -> TextInput:
    config = _read(network / "config.json", _Network)
    texts = _read(network / "sentence_bert_config.json", _Texts, absent=_Texts())
    prompts = _read(folder / "config_sentence_transformers.json", _Prompts, absent=_Prompts())
    if prompts.default_prompt_name is not None:
        cure = (
            "Remove `default_prompt_name` from config_sentence_transformers.json; clients then send it in their texts."
        )
        raise _unknown(folder, f"default_prompt_name: {prompts.default_prompt_name}", cure)
    eos = config.eos_token_id if isinstance(config.eos_token_id, int) else 0
    pad_id = eos if config.pad_token_id is None else config.pad_token_id
    positions = config.max_position_embeddings
    if positions is not None and config.model_type in _POSITIONS_BEHIND_PAD:
        positions -= pad_id + 1
    longest = min((length for length in (texts.max_seq_length, positions) if length), default=_DEFAULT_TOKENS)
    length = options.sequence_length or longest
    if positions is not None and length > positions:
        rule = f"'sequence_length' is above the network's {positions} positions"
        raise refused(f"options of {folder}", length, rule, f"Give at most {positions}.")
    place = tokenizer_place(options.tokenizer, str(network))
    file = None if place is None else tokenizer_file(place)
    if file is None or not file.exists():
        cure = (
            "Save it there with AutoTokenizer.from_pretrained(…).save_pretrained(…), or name it as `options.tokenizer`."
        )
        raise refused("model", str(folder), "has no tokenizer.json", cure)
    if texts.do_lower_case:
        raise _unknown(folder, "do_lower_case: true", "Give a tokenizer that does this itself, and set it false.")
    return TextInput(
        sequence_length=length,
        vocabulary_size=config.vocab_size,
        pad_id=pad_id,
        tokenizer_path=str(file.resolve()),
        truncate=bool(options.truncate),
    )


def _read(file: Path, kind: type[T], absent: T | None = None) -> T:
    """Return a JSON file; `absent` where there is none, if that is given."""
    if absent is not None and not file.exists():
        return absent
    return _converted(file, parse_json(read_text(file), str(file)), kind)


def _converted(file: Path, given: Any, kind: type[T]) -> T:
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        cure = "Save the encoder again with sentence-transformers."
        raise refused("model", str(file), f"is no file of a sentence encoder ({error})", cure) from error


def _unknown(folder: Path, value: object, cure: str) -> InvalidInputError:
    return refused("model", str(folder), f"has a part that is not known here: {value}", cure)
