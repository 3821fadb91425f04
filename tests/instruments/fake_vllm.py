"""vLLM as far as it is used: an engine in this process that decides by itself what a step holds, with the names and
arguments of its release 0.33.0. Its tokens follow the prompt: each is the sum of all before it, modulo the vocabulary.

Installed as the modules `vllm` and `vllm.sampling_params` by `installed`.
"""

from __future__ import annotations

import enum
import sys
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

__all__ = ["ENGINES", "FakeEngine", "installed", "written"]

ENGINES: list[FakeEngine] = []
VOCABULARY = 50


class RequestOutputKind(enum.Enum):
    CUMULATIVE = 0
    DELTA = 1


@dataclass
class SamplingParams:
    max_tokens: int
    temperature: float
    top_p: float
    seed: int
    stop_token_ids: list[int]
    detokenize: bool
    output_kind: RequestOutputKind


@dataclass
class EngineArgs:
    model: str
    skip_tokenizer_init: bool
    dtype: str
    seed: int
    kv_cache_memory_bytes: int
    gpu_memory_utilization: float
    block_size: int
    enable_prefix_caching: bool
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    async_scheduling: bool
    disable_log_stats: bool


@dataclass
class _Request:
    name: str
    tokens: list[int]
    params: SamplingParams
    unread: int
    made: list[int] = field(default_factory=list)


class FakeEngine:
    """Reads prompts first come first served, cut where a step is full, and decodes all that are read; `lags` steps
    bring nothing first."""

    bytes_per_token = 2 * 2 * 2 * 16 * 4  # of the configuration in the tests

    def __init__(self, args: EngineArgs) -> None:
        self.args = args
        blocks = args.kv_cache_memory_bytes // (self.bytes_per_token * args.block_size)
        self.vllm_config = SimpleNamespace(cache_config=SimpleNamespace(num_gpu_blocks=blocks))
        self.open: dict[str, _Request] = {}
        self.aborted: list[str] = []
        self.steps = 0
        self.fails: Exception | None = None

    @classmethod
    def from_engine_args(cls, args: EngineArgs) -> FakeEngine:
        ENGINES.append(cls(args))
        return ENGINES[-1]

    def add_request(self, request_id: str, prompt: dict[str, list[int]], params: SamplingParams) -> str:
        tokens = prompt["prompt_token_ids"]
        assert request_id not in self.open
        assert len(tokens) + params.max_tokens <= self.args.max_model_len
        self.open[request_id] = _Request(request_id, list(tokens), params, len(tokens))
        return f"{request_id}-internal"

    def abort_request(self, request_ids: list[str], internal: bool = False) -> None:
        assert not internal
        self.aborted += request_ids
        for name in request_ids:
            self.open.pop(name, None)

    def has_unfinished_requests(self) -> bool:
        return bool(self.open)

    def step(self) -> list[Any]:
        self.steps += 1
        if self.fails is not None:
            failure, self.fails = self.fails, None
            raise failure
        left = self.args.max_num_batched_tokens
        outputs = []
        for each in list(self.open.values())[: self.args.max_num_seqs]:
            read = min(left, each.unread or 1)
            if not read:
                break
            left -= read
            each.unread = max(0, each.unread - read)
            if each.unread:
                continue
            token = sum(each.tokens) % VOCABULARY
            each.tokens.append(token)
            each.made.append(token)
            finish = None
            if token in each.params.stop_token_ids:
                finish = "stop"
            elif len(each.made) >= each.params.max_tokens:
                finish = "length"
            if finish is not None:
                del self.open[each.name]
            part = SimpleNamespace(token_ids=[token], finish_reason=finish)
            outputs.append(SimpleNamespace(request_id=each.name, outputs=[part], finished=finish is not None))
        return outputs


def written(prompt: list[int], most: int, ends: tuple[int, ...] = ()) -> list[int]:
    """Return what the engine writes after a prompt."""
    tokens, made = list(prompt), list[int]()
    while len(made) < most:
        token = sum(tokens) % VOCABULARY
        if token in ends:
            break
        tokens.append(token)
        made.append(token)
    return made


def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `import vllm` find this."""
    module, sampling = ModuleType("vllm"), ModuleType("vllm.sampling_params")
    module.__dict__.update(LLMEngine=FakeEngine, EngineArgs=EngineArgs, SamplingParams=SamplingParams)
    sampling.__dict__.update(RequestOutputKind=RequestOutputKind)
    monkeypatch.setitem(sys.modules, "vllm", module)
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", sampling)
    monkeypatch.delitem(sys.modules, "tenuto.profiles.networks.vllm_model", raising=False)
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    ENGINES.clear()
