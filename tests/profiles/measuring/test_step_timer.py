"""Steps of models that generate, timed by themselves: on a made-up model whose costs are known, and a tiny real one."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from tenuto.cli import main
from tenuto.errors import EnvironmentFaultError
from tenuto.profiles import Profile
from tenuto.profiles.generation import StepCost
from tenuto.profiles.measuring import step_worker
from tenuto.profiles.measuring.measure import STOPPED
from tenuto.profiles.measuring.step_timer import StepTimer, blocks_needed, measure_steps
from tenuto.profiles.measuring.step_worker import StepRequest, limits_of
from tenuto.profiles.networks.generating import Ending, Sampling, StepRan, blocks_of
from tests.instruments.virtual_gpu import SMS, UUID, fake_nvml

COST = StepCost.line(2.0, 0.05, 0.5, 0.001, 0.0)
LIMITS = {"max_sequences": 12, "max_batch_tokens": 200, "longest": 300}


class MadeUp:
    """Takes as long as COST says; every seventh token ends its sequence. It runs out of memory as a real one does."""

    block_tokens = 16
    kv_bytes_per_token, weights_mib = 512.0, 100.0
    fails_at = 1000  # tokens of a step

    def __init__(self, blocks: int, slower: float = 1.0) -> None:
        self.blocks, self.slower = blocks, slower
        self.lengths: dict[int, int] = {}
        self.ran: dict[int, int] = {}
        self.made = 0

    @property
    def free_blocks(self) -> int:
        return self.blocks - sum(blocks_of(tokens, 16) for tokens in self.ran.values())

    def add(self, sequence: int, prompt: Sequence[int], sampling: Sampling) -> None:
        self.lengths[sequence], self.ran[sequence] = len(prompt), 0

    def step(self, chunks: Sequence[tuple[int, int]]) -> StepRan:
        if sum(tokens for _, tokens in chunks) >= self.fails_at:
            raise EnvironmentFaultError("the GPU is gone")
        assert chunks
        assert sum(tokens for _, tokens in chunks) <= LIMITS["max_batch_tokens"]
        decodes = [s for s, _ in chunks if self.ran[s] >= self.lengths[s]]
        reads = sum(tokens for s, tokens in chunks if self.ran[s] < self.lengths[s])
        context = sum(self.ran[s] for s in decodes)
        step = StepRan(self.slower * COST.ms(reads, len(decodes), context))
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


def made_up_worker() -> None:
    """Be the worker on the GPU of virtual time, where a step takes as much longer as its share is smaller."""
    from tests.instruments.virtual_gpu import VirtualGpu

    def load(request: StepRequest, device: str) -> tuple[MadeUp, int]:
        assert device == "cuda"
        share = float(os.environ.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "100"))
        blocks = blocks_needed(**limits_of(request, LIMITS["longest"]), block_tokens=16)
        model = MadeUp(blocks, 100.0 / share)
        model.fails_at = int(os.environ.get("MADE_UP_FAILS_AT", "1000")) if share < 100.0 else 1000
        return model, LIMITS["longest"]

    with VirtualGpu().installed():
        step_worker.main(load)  # type: ignore[arg-type]  # it lacks what is not measured


@pytest.fixture
def on_gpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, worker_server: Callable[[str], list[str]]
) -> Callable[..., tuple[int, str]]:
    """Run the verb on the GPU of virtual time, beside a CUDA MPS daemon of which only the pid file is there."""
    (tmp_path / "nvidia-cuda-mps-control.pid").write_text("1\n")
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", f"GPU-{UUID}")
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(lambda: 0))
    gpu = SimpleNamespace(uuid=f"GPU-{UUID}", sm_count=SMS)
    monkeypatch.setattr("tenuto.mps.gpu_shares.read_inventory", lambda: (gpu,))
    monkeypatch.setattr(step_worker, "WORKER", worker_server(f"{__name__}:made_up_worker"))
    output = str(tmp_path / "p.yaml")

    def run(*words: str) -> tuple[int, str]:
        words = ("transformers/llama", "--generates", "--name", "m", "--budget-s", "0.01", "-o", output, *words)
        limits = (
            "--max-sequences",
            str(LIMITS["max_sequences"]),
            "--max-batch-tokens",
            str(LIMITS["max_batch_tokens"]),
        )
        with pytest.raises(SystemExit) as ended:
            main(["profile", *words, *limits])
        return int(ended.value.code or 0), output

    return run


def test_shares_of_a_gpu_are_timed_in_processes_of_their_own(
    on_gpu: Callable[..., tuple[int, str]], capsys: pytest.CaptureFixture[str]
) -> None:
    code, output = on_gpu("--shares", "50,100")
    told = capsys.readouterr().err
    assert code == 0, told
    profile = Profile.load(output)
    assert profile.gpu_type == "v100"
    generation = profile.models["m"].generation
    assert generation is not None
    assert [step.share_pct for step in generation.steps] == [100.0, 50.0]
    for share, slower in ((100.0, 1.0), (50.0, 2.0), (75.0, 4 / 3)):
        assert generation.cost(share).ms(100, 8, 800) == pytest.approx(slower * COST.ms(100, 8, 800), rel=0.05)
    assert "50 %: 16 prompt tokens: 5.60 ms" in told


@pytest.mark.parametrize("tokens", [1, 64, 200])
def test_what_was_timed_before_a_fault_is_kept_and_the_rest_comes_later(
    on_gpu: Callable[..., tuple[int, str]],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tokens: int,
) -> None:
    monkeypatch.setenv("MADE_UP_FAILS_AT", str(tokens))
    code, output = on_gpu("--shares", "50,100")
    assert code == 3
    assert "the GPU is gone" in capsys.readouterr().err
    before = Profile.load(output).models["m"]
    assert before.generation is not None
    assert [timed.share_pct for timed in before.generation.steps] == ([100.0, 50.0] if tokens > 1 else [100.0])
    assert any(STOPPED in doubt for doubt in before.doubts)
    monkeypatch.delenv("MADE_UP_FAILS_AT")
    code, _ = on_gpu("--shares", "50,100", "--resume")
    told = capsys.readouterr().err
    assert code == 0, told
    assert "100 %: " not in told
    after = Profile.load(output).models["m"]
    assert after.generation is not None
    assert after.generation.steps[0] == before.generation.steps[0]
    assert after.generation.cost(50.0).ms(100, 8, 800) == pytest.approx(2.0 * COST.ms(100, 8, 800), rel=0.05)
    assert not any(STOPPED in doubt for doubt in after.doubts)


def test_a_share_that_is_not_enforced_ends_the_run(
    on_gpu: Callable[..., tuple[int, str]], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_GPU_DETACHED", "1")
    code, output = on_gpu("--shares", "50")
    assert code == 3
    assert "sees 80 of 80 SMs: the share is not enforced" in capsys.readouterr().err
    assert not Path(output).exists()


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


def test_a_time_that_other_work_made_longer_is_no_longer_than_that_of_a_larger_step() -> None:
    class Disturbed(MadeUp):
        """Takes a hundred times as long for 16 prompt tokens and for one sequence."""

        def step(self, chunks: Sequence[tuple[int, int]]) -> StepRan:
            ran = super().step(chunks)
            if sum(tokens for _, tokens in chunks) in (1, 16):
                ran.execution_ms *= 100.0
            return ran

    timer = StepTimer(Disturbed(blocks_needed(**LIMITS, block_tokens=16)), budget_s=0.0)
    found = measure_steps(timer, **LIMITS)
    assert found.prefill_ms[0] == (16.0, found.prefill_ms[1][1])
    assert found.decode_ms[0] == (1.0, found.decode_ms[1][1])
    assert all(found.ms(tokens, 2) > 0.0 for tokens in (1, 16, 200, 1000))


@pytest.mark.usefixtures("quick_workers")
def test_a_tiny_model_is_measured_on_the_processor(tmp_path: Path) -> None:
    config = "hidden_size: 32, num_hidden_layers: 1, num_attention_heads: 2, intermediate_size: 32, vocab_size: 64"
    config += ", max_position_embeddings: 96"
    words = ["profile", "transformers/llama", "--generates", "--name", "tiny", "--device", "cpu", "--budget-s", "0.01"]
    words += ["--shares", "50,100"]
    words += ["--max-sequences", "2", "--max-batch-tokens", "32", "--option", f"config={{{config}}}"]
    output = tmp_path / "cpu.yaml"
    with pytest.raises(SystemExit, match="0"):
        main([*words, "-o", str(output)])
    found = Profile.load(output).models["tiny"]
    assert found.generation is not None
    assert found.generation.longest_context == 96
    assert found.generation.kv_bytes_per_token == 2 * 32 * 4  # keys and values of 32 numbers of 4 bytes
    assert [step.share_pct for step in found.generation.steps] == [100.0, 50.0]
    assert found.generation.cost(100.0).ms(32, 2) > 0


@pytest.mark.usefixtures("quick_workers")
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["resnet50", "bert", "--generates"], "must be one model"),
        (["transformers/llama", "--generates", "--shares", "0,50"], "above 0, up to 100"),
        (["transformers/llama", "--generates", "--max-sequences", "600"], "--max-batch-tokens"),
        (["transformers/llama", "--max-sequences", "8"], "belongs to --generates"),
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
