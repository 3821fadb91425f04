"""Causal language models that vLLM runs, in this process and step by step.

vLLM decides by itself what a step holds. It gets a sequence when the first part of its prompt is to be read: so which
sequences are taken, which wait and which have memory is decided by the caller. When vLLM goes another way than asked,
the tokens that it makes early wait here until they are asked for. The caller then gets what it expects of a step.

vLLM's engine usually has a process of its own. Here it has none, so that the share and the memory limit of this process
hold for it, and it ends with this process. Importing this module imports vLLM, which belongs to an environment of its
own. What is used of it was read in its release 0.33.0.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from tenuto.errors import EnvironmentFaultError, first_line
from tenuto.profiles.networks.generating import Ending, Sampling, StepRan, TokenScores, blocks_of, longest_sequence
from tenuto.profiles.networks.text_networks import prepare_transformers
from tenuto.profiles.networks.tokenizer_files import BYTE_TOKENIZER, tokenizer_file

# vLLM reads this when it makes an engine: without it the engine has a process of its own.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

try:
    import torch
    import vllm

    prepare_transformers()
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig
    from vllm.config import StructuredOutputsConfig
    from vllm.exceptions import VLLMError
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
except ImportError as error:
    raise EnvironmentFaultError(
        f"the runtime 'vllm' needs {error.name}, which is not installed. Make an environment of its own for it with "
        "pip install 'tenuto[vllm]', and run Ray from that; or remove `runtime` from the model's options."
    ) from error

_SPARE_BLOCKS = 1  # format: vLLM keeps one block to itself
# format: the part of the GPU that vLLM wants free when it starts, 92 % by itself; its memory is given in bytes.
_WANTED_FREE = 0.01


@dataclass(slots=True)
class _Sequence:
    """An open sequence: its tokens so far, and those that have run as far as the caller knows.

    `named` is vLLM's name of it, "" before vLLM has it. `early` are tokens that the caller has not asked for; `ending`
    comes after them.
    """

    prompt: list[int]
    sampling: Sampling
    tokens: list[int]
    named: str = ""
    run: int = 0
    early: deque[int] = field(default_factory=deque)
    scores: deque[TokenScores] = field(default_factory=deque)  # of the early tokens; before the first, of the prompt
    ending: Ending | None = None

    @property
    def is_read(self) -> bool:
        """Whether all tokens that it has will have run, so that a step brings the next one."""
        return self.run >= len(self.prompt) + len(self.tokens)


class VllmModel:
    """See `tenuto.profiles.networks.generating.Generator`."""

    def __init__(
        self,
        folder: str,
        *,
        blocks: int,
        block_tokens: int,
        max_sequences: int,
        max_batch_tokens: int,
        longest: int | None = None,
        dtype: str = "auto",
        seed: int = 0,
        tokenizer: str | None = None,
    ) -> None:
        """Load a model, and reserve the memory of all blocks.

        Args:
            folder: its weights, as `save_pretrained` wrote them.
            blocks: how many there are.
            block_tokens: tokens of one of them.
            max_sequences: the most sequences at a time.
            max_batch_tokens: the most tokens of one step.
            longest: the most tokens of a sequence, if that is less than the model's positions.
            dtype: of weights, keys and values: `float32`, `float16`, `bfloat16`, or `auto` for that of the weights.
            seed: of draws without a seed of their own.
            tokenizer: of the texts that keep a schema: a folder, or a file in one.

        Raises:
            EnvironmentFaultError: vLLM does not take the model, or makes fewer blocks.
        """
        self.blocks, self.block_tokens = blocks, block_tokens
        self.config = AutoConfig.from_pretrained(folder, local_files_only=True)
        self._ends = _end_tokens(folder, self.config)
        kept_as: torch.dtype = (self.config.dtype or torch.float32) if dtype == "auto" else getattr(torch, dtype)
        size = _bytes_per_token(self.config, kept_as)
        tokenizer, self.refuses = _tokenizer(tokenizer)
        positions = (longest, longest_sequence(self.config), blocks * block_tokens)
        try:
            self._engine = vllm.LLMEngine.from_engine_args(
                vllm.EngineArgs(
                    model=folder,
                    tokenizer=tokenizer,
                    skip_tokenizer_init=tokenizer is None,  # it is for schemas: gateways make and read the texts
                    # What gateways check schemas with; vLLM's own choice depends on the schema.
                    structured_outputs_config=StructuredOutputsConfig(backend="guidance"),
                    dtype=str(kept_as).removeprefix("torch."),
                    seed=seed,
                    kv_cache_memory_bytes=(blocks + _SPARE_BLOCKS) * block_tokens * size,
                    gpu_memory_utilization=_WANTED_FREE,
                    block_size=block_tokens,
                    enable_prefix_caching=False,  # a block belongs to one sequence, as plans count them
                    max_num_seqs=max_sequences,
                    max_num_batched_tokens=max_batch_tokens,
                    max_model_len=min(most for most in positions if most is not None),
                    async_scheduling=False,  # a step ends before the next one is decided
                    disable_log_stats=True,
                )
            )
        except (ValueError, RuntimeError) as error:
            raise EnvironmentFaultError(f"vLLM does not take {folder}: {first_line(error)}") from error
        made = self._engine.vllm_config.cache_config.num_gpu_blocks
        if made < blocks:
            raise EnvironmentFaultError(f"vLLM has {made} blocks of memory for {folder}, and the plan needs {blocks}")
        self._names = count()
        self._open: dict[int, _Sequence] = {}
        self._by_name: dict[str, _Sequence] = {}

    @property
    def free_blocks(self) -> int:
        """The blocks that no sequence holds, by the tokens that have run."""
        return self.blocks - sum(blocks_of(each.run, self.block_tokens) for each in self._open.values())

    def add(self, sequence: int, prompt: Sequence[int], sampling: Sampling, made: Sequence[int] = ()) -> None:
        """Take a sequence."""
        if sampling.schema and "response_format" in self.refuses:
            raise ValueError(self.refuses["response_format"])
        self._open[sequence] = _Sequence(list(prompt), sampling, list(made))

    def step(self, chunks: Sequence[tuple[int, int]]) -> StepRan:
        """Run steps until each sequence that has read its prompt has its next token; mostly that is one step."""
        begun_s = time.perf_counter()
        ran, sequences = StepRan(0.0), []
        for sequence, tokens in chunks:
            each = self._open[sequence]
            each.run += tokens
            try:
                if not each.named:
                    self._hand_over(each)
            except (ValueError, VLLMError) as error:  # what is asked of this one
                ran.failed[sequence] = first_line(error)
                continue
            if each.is_read:
                sequences.append(sequence)
        waits = [self._open[sequence] for sequence in sequences]
        is_first = len(ran.failed) < len(chunks)
        while (is_first and not sequences) or any(not each.early and each.ending is None for each in waits):
            if not self._engine.has_unfinished_requests():
                raise RuntimeError("vLLM has ended a sequence without a word")
            for output in self._engine.step():
                self._came(output)
            is_first = False
        for sequence, each in zip(sequences, waits, strict=True):
            if each.early:
                ran.tokens[sequence] = each.early.popleft()
                each.tokens.append(ran.tokens[sequence])
            if each.scores:
                ran.scores[sequence] = [each.scores.popleft() for _ in range(len(each.scores) - len(each.early))]
            # The token that ends a text is none of its tokens: its step brings the end alone.
            is_last = each.ending is Ending.LENGTH or sequence not in ran.tokens
            if not each.early and each.ending is not None and is_last:
                ran.ended[sequence] = each.ending
        for sequence in [*ran.ended, *ran.failed]:
            self.cancel(sequence)
        ran.execution_ms = (time.perf_counter() - begun_s) * 1000.0
        return ran

    def _hand_over(self, each: _Sequence) -> None:
        """Let vLLM go on behind the tokens that a sequence has.

        Raises:
            ValueError: vLLM cannot keep what is asked.
        """
        sampling, made = each.sampling, len(each.tokens)
        if sampling.schema and made:
            raise ValueError("vLLM cannot go on amid a text that keeps a schema")
        params = vllm.SamplingParams(
            max_tokens=sampling.max_tokens - made,
            min_tokens=max(0, sampling.min_tokens - made),
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            seed=sampling.seed % 2**63,  # -1 is none to vLLM
            stop_token_ids=[] if sampling.ignores_end else sorted(self._ends),
            ignore_eos=sampling.ignores_end,
            logit_bias=dict(sampling.logit_bias) or None,
            logprobs=sampling.logprobs,
            prompt_logprobs=sampling.logprobs if sampling.prompt_logprobs and not made else None,
            structured_outputs=StructuredOutputsParams(json=sampling.schema) if sampling.schema else None,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        name = str(next(self._names))
        self._engine.add_request(name, {"prompt_token_ids": [*each.prompt, *each.tokens]}, params)
        each.named, self._by_name[name] = name, each

    def _came(self, output: Any) -> None:
        """Keep what vLLM made."""
        each = self._by_name.get(output.request_id)
        if each is None:
            return
        (part,) = output.outputs
        tokens = list(part.token_ids)
        if output.finished:
            each.ending = Ending.STOP if part.finish_reason == "stop" else Ending.LENGTH
            if tokens and each.ending is Ending.STOP and tokens[-1] in self._ends:
                tokens.pop()
        each.early += tokens
        likeliest = each.sampling.logprobs
        if likeliest is not None:
            for token, logprobs in zip(each.prompt, output.prompt_logprobs or (), strict=False):
                if logprobs is not None:  # nothing comes before the first
                    each.scores.append(_scores(token, logprobs, likeliest))
            for token, logprobs in zip(tokens, part.logprobs or (), strict=False):
                each.scores.append(_scores(token, logprobs, likeliest))

    def cancel(self, sequence: int) -> None:
        """Forget a sequence; vLLM frees its blocks before its next step."""
        each = self._open.pop(sequence, None)
        if each is not None:
            self._take_back(each)

    def preempt(self, sequence: int) -> None:
        """Take a sequence back from vLLM; it stays open, and is read again."""
        each = self._open[sequence]
        self._take_back(each)
        each.named, each.run, each.ending = "", 0, None
        each.early.clear()
        each.scores.clear()

    def _take_back(self, each: _Sequence) -> None:
        if self._by_name.pop(each.named, None) is not None and each.ending is None:
            self._engine.abort_request([each.named])

    def close(self) -> None:
        """Release the model and all memory."""
        self._open.clear()
        self._by_name.clear()
        del self._engine


def _scores(token: int, logprobs: Mapping[int, Any], likeliest: int) -> TokenScores:
    """Return what vLLM tells of a token and of the likeliest ones at its place."""
    first = sorted(logprobs.items(), key=lambda item: item[1].logprob, reverse=True)[:likeliest]
    return TokenScores(logprobs[token].logprob, [(name, each.logprob) for name, each in first])


def _tokenizer(place: str | None) -> tuple[str | None, dict[str, str]]:
    """Return the folder of a tokenizer that vLLM can keep schemas with, or what cannot be kept without one."""
    why = "needs a tokenizer in the model's folder of weights, or in `options.tokenizer`"
    if place is not None and place != BYTE_TOKENIZER:
        folder = str(tokenizer_file(place).parent)
        try:
            if AutoTokenizer.from_pretrained(folder, local_files_only=True).is_fast:
                return folder, {}
        except (OSError, ValueError) as error:
            why = f"needs a tokenizer that transformers can read ({first_line(error)})"
    return None, {"response_format": why}


def _bytes_per_token(config: Any, kept_as: torch.dtype) -> int:
    """Return the memory of one token's keys and values in all layers, of a decoder with the same heads in each."""
    text = config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return 2 * int(text.num_hidden_layers) * int(heads) * int(width) * kept_as.itemsize


def _end_tokens(folder: str, config: Any) -> frozenset[int]:
    """Return the tokens that end a text: those of the folder's generation_config.json, else those of the
    configuration."""
    ends = config.get_text_config().eos_token_id
    with contextlib.suppress(OSError):
        ends = GenerationConfig.from_pretrained(folder, local_files_only=True).eos_token_id or ends
    return frozenset([] if ends is None else [ends] if isinstance(ends, int) else ends)
