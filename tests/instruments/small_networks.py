"""Options that make networks of the catalogue small enough for a test."""

from typing import Any

SMALL: dict[str, dict[str, Any]] = {
    "mobilenet_v2": {"image_size": 32, "config": {"width_mult": 0.25}},
    "bert": {
        "sequence_length": 8,
        "config": {
            "hidden_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "intermediate_size": 16,
            "vocab_size": 1000,
        },
    },
    "gpt2": {
        "sequence_length": 8,
        "config": {
            "n_embd": 16,
            "n_layer": 1,
            "n_head": 2,
            "vocab_size": 1000,
            "pad_token_id": 999,
            "bos_token_id": 999,
            "eos_token_id": 999,
        },
    },
    "bloom_560": {"sequence_length": 8, "config": {"hidden_size": 16, "n_layer": 1, "n_head": 2, "vocab_size": 1000}},
    "t5": {
        "sequence_length": 8,
        "config": {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2, "vocab_size": 1000},
    },
    "xlnet": {
        "sequence_length": 8,
        "config": {"d_model": 16, "n_layer": 1, "n_head": 2, "d_inner": 16, "vocab_size": 1000},
    },
}
