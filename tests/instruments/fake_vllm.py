"""vLLM as far as it is used: an engine in this process that decides by itself what a step holds, with the names and
arguments of its release 0.33.0. Its tokens follow the prompt: each is the sum of all before it, modulo the vocabulary.

Installed as the modules `vllm`, `vllm.config` and `vllm.sampling_params` by `installed`.
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


class VLLMError(Exception):
    pass


class RequestOutputKind(enum.Enum):
    CUMULATIVE = 0
    DELTA = 1


@dataclass
class StructuredOutputsParams:
    json: str


@dataclass
class StructuredOutputsConfig:
    backend: str


@dataclass
class SamplingParams:
    max_tokens: int
    temperature: float
    top_p: float
    seed: int
    stop_token_ids: list[int]
    detokenize: bool
    output_kind: RequestOutputKind
    min_tokens: int
    ignore_eos: bool
    logit_bias: dict[int, float] | None
    logprobs: int | None
    prompt_logprobs: int | None
    structured_outputs: StructuredOutputsParams | None


@dataclass
class Logprob:
    logprob: float
    rank: int
    decoded_token: str | None = None


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
    tokenizer: str | None
    structured_outputs_config: StructuredOutputsConfig


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
        if params.structured_outputs is not None and "not" in params.structured_outputs.json:
            raise VLLMError("Unimplemented keys: not")
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
            for other, bias in (each.params.logit_bias or {}).items():
                token = other if bias >= 100.0 else token
            if len(each.made) < each.params.min_tokens and token in each.params.stop_token_ids:
                token = (token + 1) % VOCABULARY
            each.tokens.append(token)
            each.made.append(token)
            finish = None
            if token in each.params.stop_token_ids:
                finish = "stop"
            elif len(each.made) >= each.params.max_tokens:
                finish = "length"
            if finish is not None:
                del self.open[each.name]
            wants = each.params.logprobs, each.params.prompt_logprobs
            told = None if wants[0] is None else [told_of(token, wants[0])]
            part = SimpleNamespace(token_ids=[token], finish_reason=finish, logprobs=told)
            prompt = None
            if wants[1] is not None:
                read = each.tokens[: -len(each.made)]
                # With the first token alone, as it tells differences.
                prompt = [None, *(told_of(one, wants[1]) for one in read[1:])] if len(each.made) == 1 else []
            ended = finish is not None
            outputs.append(
                SimpleNamespace(request_id=each.name, outputs=[part], finished=ended, prompt_logprobs=prompt)
            )
        return outputs


def told_of(token: int, likeliest: int) -> dict[int, Logprob]:
    """Return what it tells of a token: the token itself first, and then those that are as likely as they are low."""
    first = {other: Logprob(-0.1 * (other + 1), other + 1) for other in range(likeliest)}
    return {token: Logprob(-0.1 * (token + 1), token + 1)} | first


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
    module, sampling, config = (ModuleType(f"vllm{below}") for below in ("", ".sampling_params", ".config"))
    errors = ModuleType("vllm.exceptions")
    errors.__dict__.update(VLLMError=VLLMError)
    monkeypatch.setitem(sys.modules, "vllm.exceptions", errors)
    module.__dict__.update(LLMEngine=FakeEngine, EngineArgs=EngineArgs, SamplingParams=SamplingParams)
    sampling.__dict__.update(RequestOutputKind=RequestOutputKind, StructuredOutputsParams=StructuredOutputsParams)
    config.__dict__.update(StructuredOutputsConfig=StructuredOutputsConfig)
    monkeypatch.setitem(sys.modules, "vllm.config", config)
    monkeypatch.setitem(sys.modules, "vllm", module)
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", sampling)
    monkeypatch.delitem(sys.modules, "tenuto.profiles.networks.vllm_model", raising=False)
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    ENGINES.clear()
