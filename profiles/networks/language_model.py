"""Causal language models of transformers, run step by step by its continuous batching, which is driven by hand.

Continuous batching has a loop and a scheduler of its own. Here its parts are called one by one, so that the caller
decides what each step holds. These are private calls, and they move from release to release: they stand in this module
only, and `_CHECKED` names the releases they were tried with. Importing this module imports torch and transformers.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from tenuto.errors import EnvironmentFaultError, InvalidInputError, first_line, is_lack_of_memory, refused
from tenuto.profiles.networks.generating import Ending, Sampling, StepRan, TokenScores
from tenuto.profiles.networks.grammars import GrammarError, Grammars
from tenuto.profiles.networks.import_factory import check_path
from tenuto.profiles.networks.shaping import Shaping, scores_of
from tenuto.profiles.networks.text_networks import load_complete, prepare_transformers

_CHECKED = ("5.23",)  # releases of transformers whose private calls are those used below
_NO_SCORES = "there was not enough memory for the log probabilities of its prompt"
_RANDOM = "transformers/"  # sources of random weights: `transformers/llama`


def load_language_model(
    source: str, *, weights_path: str | None = None, seed: int = 0, config: Mapping[str, Any] | None = None
) -> Any:
    """Return a causal language model in evaluation mode, on the CPU, from local files only.

    Args:
        source: a folder with config.json and safetensors, or `transformers/TYPE` for random weights.
        weights_path: such a folder; the source is only a name then.
        seed: of random weights.
        config: arguments of the configuration of random weights.

    Raises:
        InvalidInputError: no such folder or type, a place that is not allowed, weights that are not complete, or a
            network that makes no tokens.
    """
    prepare_transformers()
    folder = weights_path or (source if Path(source).is_dir() else None)
    try:
        if folder is not None:
            return _from_folder(Path(folder), dict(config or {}))
        if not source.startswith(_RANDOM):
            raise refused(
                "source",
                source,
                "is neither a folder nor a type of network",
                "Give a folder written by save_pretrained, or transformers/TYPE (such as transformers/llama).",
            )
        made = transformers.AutoConfig.for_model(source.removeprefix(_RANDOM), **(config or {}))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return transformers.AutoModelForCausalLM.from_config(made).eval()
    except (OSError, ValueError, TypeError, RuntimeError) as error:
        raise refused(
            "model",
            folder or source,
            f"cannot be loaded as a causal language model ({first_line(error)})",
            "Give a model with a language-modelling head, saved with save_pretrained.",
        ) from error


def _from_folder(folder: Path, config: Mapping[str, Any]) -> Any:
    check_path(str(folder), "weights_path")
    if config:
        raise refused(
            "options.config", config, "a folder brings its own configuration", "Remove it, or `weights_path`."
        )
    cure = "Save the language model itself, with its head, not the network below it."
    return load_complete(transformers.AutoModelForCausalLM, folder, cure).eval()


@dataclass(slots=True)
class _Sequence:
    """An open sequence, with the tokens that it has. `shaping` is what it asks beside temperature and top_p."""

    prompt: list[int]
    sampling: Sampling
    tokens: list[int]
    shaping: Shaping | None = None
    prompt_scores: list[TokenScores] = field(default_factory=list)  # before it has a token


class LanguageModel:
    """See `tenuto.profiles.networks.generating.Generator`."""

    def __init__(
        self,
        network: Any,
        *,
        device: str,
        blocks: int,
        block_tokens: int,
        max_batch_tokens: int,
        tokenizer: str | None = None,
    ) -> None:
        """Take what `load_language_model` returned, and reserve the memory of all blocks.

        Args:
            network: the model.
            device: `cpu` or `cuda`.
            blocks: how many there are.
            block_tokens: tokens of one of them.
            max_batch_tokens: the most tokens of one step.
            tokenizer: of the texts that keep a schema; see `Grammars`.

        Raises:
            EnvironmentFaultError: this transformers is another release than the ones it was tried with.
            InvalidInputError: continuous batching cannot run this network.
        """
        if not transformers.__version__.startswith(tuple(f"{release}." for release in _CHECKED)):
            raise EnvironmentFaultError(
                f"language models run with transformers {' or '.join(_CHECKED)}, and this is "
                f"{transformers.__version__}. Run: pip install 'transformers=={_CHECKED[-1]}.*'"
            )
        self.blocks, self.block_tokens = blocks, block_tokens
        self.network = network.to(device)
        settings = transformers.ContinuousBatchingConfig(
            page_size=block_tokens,
            num_blocks=blocks,
            max_batch_tokens=max_batch_tokens,
            max_requests_per_batch=max_batch_tokens,
            max_blocks_per_request=0,  # the path with block tables needs a kernel that is not part of torch
            allow_block_sharing=False,  # a block belongs to one sequence: what a sequence ends is free at once
            use_async_batching=False,
            use_cuda_graph=False,  # each sequence samples with its own generator, which a graph cannot
            auto_switch_to_flash=False,
        )
        logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL)  # psutil, which nothing here needs
        # Greedy, and with no end of its own: what a token means to a sequence is decided here.
        greedy = transformers.GenerationConfig(do_sample=False, eos_token_id=-1)
        try:
            manager = network.init_continuous_batching(greedy, settings)
            self._batches = batches = manager._create_batch_processor()
        except (AttributeError, ValueError, NotImplementedError) as error:
            raise refused(
                "model",
                type(network).__name__,
                f"cannot run in continuous batching ({first_line(error)})",
                "Give a decoder with full or sliding-window attention, such as a Llama or a Qwen.",
            ) from error
        self._ends = _end_tokens(network)
        self._turns = batches.scheduler = batches.offloading_manager.scheduler = _Chosen(
            batches.cache, 0.0, max_batch_tokens
        )
        self._runner = batches.model_runner
        self._runner._sample = self._sample
        self._runner.supports_logits_to_keep(network)  # is kept, so that a function can stand for the network
        self._open: dict[int, _Sequence] = {}
        self._ran = StepRan(0.0)  # what the present step brings
        self._scoring: set[int] = set()  # sequences whose prompts are to be scored
        self.refuses: dict[str, str] = {}
        self._grammars: Grammars | None = None
        if tokenizer is None:
            self.refuses["response_format"] = "needs a tokenizer, and the model has none. Give it `options.tokenizer`"
        else:
            try:
                vocabulary = int(network.config.get_text_config().vocab_size)
                self._grammars = Grammars(tokenizer, vocabulary, self._ends)
            except (EnvironmentFaultError, InvalidInputError) as error:
                self.refuses["response_format"] = f"cannot be kept: {first_line(error)}"

    @property
    def kv_bytes_per_token(self) -> float:
        """The memory of one token's keys and values."""
        cache = self._batches.cache
        return float(cache.bytes_per_sector / cache.tokens_per_sector)

    @property
    def weights_mib(self) -> float:
        """The memory of the weights."""
        return float(sum(each.numel() * each.element_size() for each in self.network.parameters()) / 2**20)

    @property
    def free_blocks(self) -> int:
        """The blocks that no sequence holds."""
        self._batches.cache.pool.try_to_free_sectors()
        pool, cache = self._batches.cache.pool, self._batches.cache
        return int(pool.num_free_sectors * cache.num_blocks // cache.num_sectors)

    def add(self, sequence: int, prompt: Sequence[int], sampling: Sampling, made: Sequence[int] = ()) -> None:
        """Take a sequence."""
        shaping = None if sampling.is_plain else self._shaping(sampling, made)
        self._open[sequence] = _Sequence(list(prompt), sampling, list(made), shaping)
        if sampling.prompt_logprobs and not made:
            self._scoring.add(sequence)
        self._turns.add(sequence, [*prompt, *made])

    def _shaping(self, sampling: Sampling, made: Sequence[int]) -> Shaping:
        if not sampling.schema:
            return Shaping(sampling, self._ends, None)
        if self._grammars is None:
            raise ValueError(self.refuses["response_format"])
        return Shaping(sampling, self._ends | self._grammars.ends, self._grammars.begin(sampling.schema, made))

    def step(self, chunks: Sequence[tuple[int, int]]) -> StepRan:
        """Run one step."""
        begun_s = time.perf_counter()
        self._turns.chunks = chunks
        batches, self._ran = self._batches, StepRan(0.0)
        if not batches.prepare_next_batch():
            raise ValueError("a step needs a sequence")
        batches._generation_step(self._scored if self._scoring else self.network)
        made = {
            int(each.state.request_id): each.state
            for each in batches.inputs_and_outputs.requests_in_batch
            if each.has_new_token
        }
        batches.update_batch()
        ran = self._ran
        for sequence, state in made.items():
            token, each = state.generated_tokens[-1], self._open[sequence]
            if sequence in ran.failed:
                continue
            if token in (self._ends if each.shaping is None else each.shaping.ends):
                ran.ended[sequence] = Ending.STOP
            else:
                ran.tokens[sequence] = token
                each.tokens.append(token)
                if len(each.tokens) >= each.sampling.max_tokens:
                    ran.ended[sequence] = Ending.LENGTH
                if each.shaping is not None:
                    self._came(sequence, each.shaping, token)
        for sequence in [*ran.ended, *ran.failed]:
            self.cancel(sequence)
        ran.execution_ms = (time.perf_counter() - begun_s) * 1000.0
        return ran

    def cancel(self, sequence: int) -> None:
        """Forget a sequence, and free its blocks at once."""
        each = self._open.pop(sequence, None)
        if each is not None:
            self._turns.finish_request(str(sequence))
            self._scoring.discard(sequence)
            if each.shaping is not None and each.shaping.grammar is not None:
                each.shaping.grammar.cancel()

    def preempt(self, sequence: int) -> None:
        """Free a sequence's blocks at once; it stays open."""
        each = self._open[sequence]
        each.prompt_scores.clear()
        self._turns.finish_request(str(sequence))
        self._turns.add(sequence, [*each.prompt, *each.tokens])

    def close(self) -> None:
        """Release the model and all memory."""
        self._open.clear()
        if self._grammars is not None:
            self._grammars.close()
        del self._batches, self._runner, self._turns, self.network

    def _sample(self, scores: torch.Tensor, output_ids: torch.Tensor) -> None:
        """Choose the next tokens from scores by [1, sequence, token], each by its own sequence's sampling."""
        rows = scores[0]
        tokens = torch.argmax(rows, dim=-1)
        making = [each for each in self._batches.inputs_and_outputs.requests_in_batch if each.has_new_token]
        for row, each in enumerate(making):
            number = int(each.state.request_id)
            sequence = self._open[number]
            if sequence.shaping is not None:
                tokens[row] = self._shaped(number, sequence, sequence.shaping, rows[row])
            elif sequence.sampling.temperature > 0.0:
                tokens[row] = _drawn(rows[row].cpu(), sequence.sampling, len(sequence.tokens))
        output_ids[0, : len(tokens)].copy_(tokens)

    def _shaped(self, number: int, sequence: _Sequence, shaping: Shaping, scores: torch.Tensor) -> int:
        """Choose the next token of a sequence that asks for more than temperature and top_p, and score it."""
        sampling, place = sequence.sampling, len(sequence.tokens)
        if number in self._ran.failed:
            return 0
        try:
            shaped = shaping.shaped(scores.cpu(), place)
        except GrammarError as error:
            self._ran.failed[number] = str(error)
            return 0
        token = _drawn(shaped, sampling, place) if sampling.temperature > 0.0 else int(shaped.argmax())
        if sampling.logprobs is not None:
            own = [] if token in shaping.ends else scores_of(scores[None], [token], sampling.logprobs)
            self._ran.scores[number] = sequence.prompt_scores + own
            sequence.prompt_scores = []
            self._scoring.discard(number)
        return token

    def _came(self, number: int, shaping: Shaping, token: int) -> None:
        """Go on by a sequence's schema, behind a token that is not its end."""
        if shaping.grammar is None:
            return
        try:
            shaping.grammar.take(token)
        except GrammarError as error:
            self._ran.failed[number] = str(error)
            self._ran.ended.pop(number, None)
        if shaping.grammar.is_complete:
            self._ran.ended[number] = Ending.STOP

    def _scored(self, **batch: Any) -> Any:
        """Run the network in its own place, and also for the scores of prompts."""
        at, rows, scored = 0, list[int](), list[tuple[int, _Sequence, list[int]]]()
        for each in self._batches.inputs_and_outputs.requests_in_batch:
            number = int(each.state.request_id)
            sequence = self._open[number]
            first = len(sequence.prompt_scores) + 1
            count = min(each.query_length, len(sequence.prompt) - first)
            if number in self._scoring and count > 0:
                rows += range(at, at + count)
                scored.append((number, sequence, sequence.prompt[first : first + count]))
            at += each.query_length
        keep = batch.get("logits_to_keep")
        positions = torch.tensor(rows, device=batch["input_ids"].device)
        try:
            if keep is None:
                out = self.network(**batch)
                scores = out.logits[0, positions]
            else:
                out = self.network(**batch | {"logits_to_keep": torch.cat([keep, positions.to(keep.dtype)])})
                scores, out.logits = out.logits[0, len(keep) :], out.logits[:, : len(keep)]
            for _, sequence, tokens in scored:
                mine, scores = scores[: len(tokens)], scores[len(tokens) :]
                sequence.prompt_scores += scores_of(mine, tokens, sequence.sampling.logprobs or 0)
        except Exception as error:
            if not is_lack_of_memory(error):
                raise
            # What the network has written it writes again: the others of the step need not know.
            self._ran.failed.update({number: _NO_SCORES for number, *_ in scored})
            return self.network(**batch)
        return out


def _drawn(scores: torch.Tensor, sampling: Sampling, place: int) -> int:
    """Return a token drawn among the likeliest that have `top_p` of the probability, the likeliest always among
    them. The draw depends on the seed and the token's place in the answer alone, so any process can go on with it."""
    least = torch.finfo(scores.dtype).tiny  # a divisor of 0 would leave no number
    steep = (scores - scores.max()) / max(sampling.temperature, least)
    likely, tokens = torch.softmax(steep, dim=-1).sort(descending=True, stable=True)
    before = likely.cumsum(dim=-1) - likely
    likely[before >= sampling.top_p] = 0.0
    likely[0] = max(float(likely[0]), torch.finfo(likely.dtype).tiny)
    reached = likely.double().cumsum(dim=-1)
    drawn = np.random.default_rng((sampling.seed % 2**64, place)).random() * float(reached[-1])
    return int(tokens[min(int(torch.searchsorted(reached, drawn, right=True)), len(tokens) - 1)])


def _end_tokens(network: Any) -> frozenset[int]:
    ends = network.generation_config.eos_token_id
    if ends is None:
        ends = network.config.get_text_config().eos_token_id
    return frozenset([] if ends is None else [ends] if isinstance(ends, int) else ends)


def _chosen_scheduler() -> type:
    """Return the scheduler that puts into a step what the caller chose."""
    from transformers.generation.continuous_batching.requests import FutureRequestState, RequestState
    from transformers.generation.continuous_batching.scheduler import Scheduler

    class Chosen(Scheduler):  # type: ignore[misc]  # transformers has no types
        chunks: Sequence[tuple[int, int]] = ()

        def add(self, sequence: int, prompt: Sequence[int]) -> None:
            name = str(sequence)
            self.active_requests[name] = RequestState(name, list(prompt), max_new_tokens=None)

        def schedule_batch(self, token_budget: int, cache_budget: int) -> tuple[list[Any], bool, int, int]:
            del token_budget, cache_budget
            states, taken_tokens, read = [], 0, 0
            for sequence, tokens in self.chunks:
                state = self.active_requests[str(sequence)]
                ready = self._infer_request_tokens(state, set())
                if not self.cache.can_store_request_tokens(state, min(tokens, len(ready))):
                    raise MemoryError("no block is free for a sequence of this step")
                read += state.current_len()
                self._schedule_request(state, ready, tokens, set())
                taken = len(state.tokens_to_process)
                states.append(FutureRequestState(state, not state.remaining_prefill_tokens, {}, taken))
                taken_tokens += taken
            return states, False, taken_tokens, read

    return Chosen


_Chosen = _chosen_scheduler()
