"""Steps of models that generate, timed by themselves: on a made-up model whose costs are known, and a tiny real one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tenuto.cli import main
from tenuto.profiles import Profile
from tenuto.profiles.generation import StepCost
from tenuto.profiles.measuring.step_timer import StepTimer, blocks_needed, measure_steps
from tenuto.profiles.networks.generating import Ending, Sampling, StepRan, blocks_of

COST = StepCost.line(2.0, 0.05, 0.5, 0.001, 0.0)
LIMITS = {"max_sequences": 12, "max_batch_tokens": 200, "longest": 300}


class MadeUp:
    """Takes as long as COST says; every seventh token ends its sequence. It runs out of memory as a real one does."""

    block_tokens = 16

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self.lengths: dict[int, int] = {}
        self.ran: dict[int, int] = {}
        self.made = 0

    @property
    def free_blocks(self) -> int:
        return self.blocks - sum(blocks_of(tokens, 16) for tokens in self.ran.values())

    def add(self, sequence: int, prompt: Sequence[int], sampling: Sampling) -> None:
        self.lengths[sequence], self.ran[sequence] = len(prompt), 0

    def step(self, chunks: Sequence[tuple[int, int]]) -> StepRan:
        assert chunks
        assert sum(tokens for _, tokens in chunks) <= LIMITS["max_batch_tokens"]
        decodes = [s for s, _ in chunks if self.ran[s] >= self.lengths[s]]
        reads = sum(tokens for s, tokens in chunks if self.ran[s] < self.lengths[s])
        context = sum(self.ran[s] for s in decodes)
        step = StepRan(COST.ms(reads, len(decodes), context))
        for sequence, tokens in chunks:
            self.ran[sequence] += tokens
            if self.ran[sequence] >= self.lengths[sequence]:
                self.made += 1
                if self.made % 7 == 0:
                    step.ended[sequence] = Ending.STOP
        assert self.free_blocks >= 0
        for sequence in step.ended:
            self.cancel(sequence)
        return step

    def cancel(self, sequence: int) -> None:
        self.lengths.pop(sequence, None)
        self.ran.pop(sequence, None)

    def preempt(self, sequence: int) -> None:
        raise AssertionError

    def close(self) -> None:
        pass


def test_the_cost_of_a_model_is_found_and_its_memory_is_free_again() -> None:
    model = MadeUp(blocks_needed(**LIMITS, block_tokens=16))
    timer = StepTimer(model, budget_s=0.0)
    found = measure_steps(timer, **LIMITS)
    assert model.free_blocks == model.blocks
    assert timer.disturbed == []
    for tokens in (16, 100, 200):
        assert found.ms(tokens) == pytest.approx(COST.ms(tokens), abs=0.05)
    for sequences in (1, 8, 12):
        assert found.ms(0, sequences, sequences * 200) == pytest.approx(
            COST.ms(0, sequences, sequences * 200), rel=0.05
        )


def test_a_tiny_model_is_measured_on_the_processor(tmp_path: Path) -> None:
    config = "hidden_size: 32, num_hidden_layers: 1, num_attention_heads: 2, intermediate_size: 32, vocab_size: 64"
    config += ", max_position_embeddings: 96"
    words = ["profile", "transformers/llama", "--generates", "--name", "tiny", "--device", "cpu", "--budget-s", "0.01"]
    words += [
        "--max-sequences",
        "2",
        "--max-batch-tokens",
        "32",
        "--option",
        f"config={{{config}, max_position_embeddings: 96}}",
    ]
    output = tmp_path / "cpu.yaml"
    with pytest.raises(SystemExit, match="0"):
        main([*words, "-o", str(output)])
    found = Profile.load(output).models["tiny"]
    assert found.generation is not None
    assert found.generation.longest_context == 96
    assert found.generation.kv_bytes_per_token == 2 * 32 * 4  # keys and values of 32 numbers of 4 bytes
    assert found.generation.cost(100.0).ms(32, 2) > 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["resnet50", "bert", "--generates"], "must be one model"),
        (["transformers/llama", "--generates", "--shares", "50"], "on the whole device only"),
        (["transformers/llama", "--generates", "--max-sequences", "600"], "--max-batch-tokens"),
        (["transformers/llama", "--generates", "--gpu", "a100"], "belongs to --from-requests"),
        (["no-such-folder", "--generates"], "neither a folder nor a type of network"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["profile", *words, "-o", str(tmp_path / "p.yaml")])
    assert said in capsys.readouterr().err
    assert not (tmp_path / "p.yaml").exists()
