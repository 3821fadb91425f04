"""transformers' sequence classifiers and sentence encoders: made from configuration or a local directory, called with
plain tensors.

Importing this module imports torch and transformers; only `tenuto.profiles.networks.models` does so, when a model is
built.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers

from tenuto.errors import first_line, refused
from tenuto.profiles.networks.encoder_files import DenseFiles, EncoderFiles
from tenuto.profiles.networks.torchvision_import import tolerate_missing_operators
from tenuto.profiles.networks.weights import apply_state, read_state


def prepare_transformers(name: str | None = None) -> None:
    """Import transformers and the classes of one network of the catalogue.

    transformers imports torchvision, and would fail with a CPU build of torch.
    """
    tolerate_missing_operators()
    for class_name in _CLASSES.get((name or "").rpartition("/")[2], ()):
        getattr(transformers, class_name)


# Catalogue name: classes of the configuration and of the network.
_CLASSES = {
    "bert": ("BertConfig", "BertForSequenceClassification"),
    "bloom_560": ("BloomConfig", "BloomForSequenceClassification"),
    "gpt2": ("GPT2Config", "GPT2ForSequenceClassification"),
    "t5": ("T5Config", "T5ForSequenceClassification"),
    "xlnet": ("XLNetConfig", "XLNetForSequenceClassification"),
}


def make_text_network(name: str, config: Mapping[str, Any]) -> Any:
    """Return a network of the catalogue from the arguments of its configuration."""
    prepare_transformers()
    config_class, network_class = (getattr(transformers, class_name) for class_name in _CLASSES[name])
    return network_class(_inference_only(config_class(**config)))


def _inference_only(config: Any) -> Any:
    """Switch off options that only generation uses. They cost memory and change no logit."""
    for key in ("use_cache", "use_mems_eval"):
        if hasattr(config, key):
            setattr(config, key, False)
    return config


class _Classifier(torch.nn.Module):
    """Calls a transformers classifier with tensors and returns its logits."""

    def __init__(self, network: Any) -> None:
        super().__init__()
        self.network = network

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, *types: torch.Tensor) -> torch.Tensor:
        named = dict(zip(("token_type_ids",), types, strict=False))
        logits: torch.Tensor = self.network(input_ids=input_ids, attention_mask=attention_mask, **named).logits
        return logits


class _T5Classifier(_Classifier):
    """Reads each text at its last attended token, where T5's end-of-text token stands.

    transformers' own forward looks for that token, and refuses a whole batch whose texts do not contain it equally
    often. Here the text of one client cannot make another's fail. For texts that end with the token and have it once,
    the logits are the same.
    """

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, *types: torch.Tensor) -> torch.Tensor:
        del types  # it knows none
        hidden = self.network.transformer(
            input_ids=input_ids, attention_mask=attention_mask, decoder_input_ids=self.network._shift_right(input_ids)
        ).last_hidden_state
        last = (attention_mask.sum(dim=1) - 1).clamp(min=0)
        rows = torch.arange(hidden.shape[0], device=hidden.device)
        logits: torch.Tensor = self.network.classification_head(hidden[rows, last])
        return logits


def classify(network: Any) -> torch.nn.Module:
    """Return a module that takes `input_ids` and `attention_mask` and returns logits. No row depends on another."""
    return _T5Classifier(network) if network.config.model_type == "t5" else _Classifier(network)


def load_directory(directory: Path, expected: str | None) -> Any:
    """Load a sequence classifier that transformers saved, from local files only and without running code in them.

    Args:
        directory: holds `config.json` and safetensors (or a state dict, read with `weights_only`).
        expected: the model type the caller asked for, or None for any.

    Raises:
        InvalidInputError: not such a directory, another model type, or weights that are not complete.
    """
    if not (directory / "config.json").exists():
        raise refused(
            "model",
            str(directory),
            "has no config.json",
            "Give a directory written by save_pretrained, or a name of the catalogue.",
        )
    prepare_transformers()
    try:
        config = _inference_only(transformers.AutoConfig.from_pretrained(str(directory), local_files_only=True))
        if expected is not None and config.model_type != expected:
            raise refused(
                "weights_path",
                str(directory),
                f"holds a '{config.model_type}', not a '{expected}'",
                "Give the directory of the model asked for.",
            )
        cure = "Save the classifier itself, with its trained head, not the language model below it."
        kind = transformers.AutoModelForSequenceClassification
        return load_complete(kind, directory, cure, config=config, dtype=torch.float32)
    except (OSError, ValueError, RuntimeError) as error:
        raise refused(
            "model",
            str(directory),
            f"cannot be loaded as a sequence classifier ({first_line(error)})",
            "Save it again with save_pretrained.",
        ) from error


class SentenceEncoder(torch.nn.Module):
    """Makes one vector of each text, by the formulas of sentence-transformers."""

    def __init__(self, network: Any, files: EncoderFiles) -> None:
        super().__init__()
        self.network = network
        self.poolings = files.poolings
        self.layers = torch.nn.ModuleList(_Unit() if dense is None else _dense(dense) for dense in files.layers)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        hidden = self.network(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        embedding = torch.cat([_pooled(way, hidden, attention_mask) for way in self.poolings], dim=-1)
        for layer in self.layers:
            embedding = layer(embedding)
        return embedding


class _Unit(torch.nn.Module):
    """Gives each vector the length of 1."""

    def forward(self, embedding: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.normalize(embedding, p=2.0, dim=1)


def _dense(files: DenseFiles) -> torch.nn.Module:
    linear = torch.nn.Linear(files.in_features, files.out_features, bias=files.bias)
    state = {key.removeprefix("linear."): value for key, value in read_state(files.weights).items()}
    apply_state(linear, state, files.weights, "dense layer")
    return torch.nn.Sequential(linear, getattr(torch.nn, files.activation)())


def _pooled(way: str, hidden: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
    """Return one vector of the vectors of each text's tokens."""
    mask = attention_mask.unsqueeze(-1).to(hidden.dtype)
    if way == "max":
        return hidden.masked_fill(mask == 0, float("-inf")).amax(dim=1)
    places = torch.arange(1, hidden.shape[1] + 1, device=hidden.device)
    if way in ("cls", "lasttoken"):
        # The attended token with the lowest place, or with the highest: argmax takes the first of equal ones.
        place = attention_mask.int().argmax(dim=1) if way == "cls" else (attention_mask * places).argmax(dim=1)
        return hidden[torch.arange(hidden.shape[0], device=hidden.device), place]
    if way == "weightedmean":
        mask = mask * places.view(1, -1, 1).to(hidden.dtype)
    total, weight = (hidden * mask).sum(dim=1), mask.sum(dim=1).clamp(min=1e-9)
    return total / (weight.sqrt() if way == "mean_sqrt_len_tokens" else weight)


def load_encoder(files: EncoderFiles) -> torch.nn.Module:
    """Load a sentence encoder, from local files only and without running code in them.

    Raises:
        InvalidInputError: its weights are missing, or are those of another network.
    """
    prepare_transformers()
    folder = files.network
    try:
        config = _inference_only(transformers.AutoConfig.from_pretrained(str(folder), local_files_only=True))
        kind = transformers.T5EncoderModel if config.model_type in ("t5", "mt5") else transformers.AutoModel
        cure = "Save the encoder again, with all of its weights."
        network = load_complete(kind, folder, cure, unused="pooler.", config=config, dtype=torch.float32)
    except (OSError, ValueError, RuntimeError) as error:
        rule = f"cannot be loaded as a sentence encoder ({first_line(error)})"
        raise refused("model", str(folder), rule, "Save it again with sentence-transformers.") from error
    return SentenceEncoder(network, files)


def load_complete(kind: Any, directory: Path, cure: str, *, unused: str | None = None, **how: Any) -> Any:
    """Return a network of a class of Transformers, from a local directory that has all of its weights, but perhaps
    those that begin with `unused`.

    Raises:
        InvalidInputError: some are missing; `cure` says what to do.
    """
    network, report = kind.from_pretrained(
        str(directory), local_files_only=True, trust_remote_code=False, output_loading_info=True, **how
    )
    missing = sorted(report["missing_keys"]) + sorted(str(key) for key in report["mismatched_keys"])
    missing = [key for key in missing if unused is None or not key.startswith(unused)]
    if missing:
        raise refused("model", str(directory), f"lacks weights of its network: {', '.join(missing[:5])}", cure)
    return network
