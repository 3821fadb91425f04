"""Folders of small sentence encoders and cross-encoders with seeded weights, as their packages save them."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["WORDS", "save_encoder", "save_ranker", "save_tokenizer"]

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "the", "cat", "sat", "on", "a", "mat", "dog", "ran", "far", "away"]
_SMALL = {
    "vocab_size": len(WORDS),
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "max_position_embeddings": 12,
}


def save_tokenizer(folder: Path) -> None:
    """One token a word, with BERT's special tokens. Like real files it says how to pad and where to cut."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from tokenizers.processors import TemplateProcessing

    tokenizer = Tokenizer(WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer.enable_padding(length=7)
    tokenizer.enable_truncation(5)
    tokenizer.save(str(folder / "tokenizer.json"))


def save_encoder(
    folder: Path,
    pooling: Mapping[str, Any] = {"pooling_mode_mean_tokens": True},
    kinds: Sequence[str] = ("Normalize",),
    *,
    width: int = 16,
    seed: int = 0,
) -> str:
    """Save a BERT with pooling and these modules behind it; `Dense` has 3 outputs. Return the folder."""
    import torch
    from safetensors.torch import save_file

    from tenuto.profiles.networks.text_networks import prepare_transformers

    prepare_transformers("transformers/bert")
    from transformers import BertConfig, BertModel

    torch.manual_seed(seed)
    folder.mkdir(exist_ok=True)
    BertModel(BertConfig(**_SMALL), add_pooling_layer=False).save_pretrained(folder)
    save_tokenizer(folder)
    modules = [("Transformer", ""), ("Pooling", "1_Pooling")]
    modules += [(kind, f"{number}_{kind}") for number, kind in enumerate(kinds, start=2)]
    listed = [{"type": f"sentence_transformers.models.{kind}", "path": path} for kind, path in modules]
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling/config.json").write_text(json.dumps({"word_embedding_dimension": 16, **pooling}))
    for kind, path in modules:
        if kind == "Dense":
            (folder / path).mkdir()
            dense = {"in_features": width, "out_features": 3, "activation_function": "torch.nn.modules.linear.Identity"}
            (folder / path / "config.json").write_text(json.dumps(dense))
            state = {"linear.weight": torch.randn(3, width), "linear.bias": torch.randn(3)}
            save_file(state, folder / path / "model.safetensors")
    return str(folder)


def save_ranker(folder: Path, *, seed: int = 0, **config: Any) -> str:
    """Save a BERT with one label. Return the folder."""
    import torch

    from tenuto.profiles.networks.text_networks import prepare_transformers

    prepare_transformers("transformers/bert")
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(seed)
    folder.mkdir(exist_ok=True)
    BertForSequenceClassification(BertConfig(**_SMALL, num_labels=1, **config)).save_pretrained(folder)
    save_tokenizer(folder)
    return str(folder)
