"""What steps of a served model cost, fitted to a log of its requests: arrivals, tokens, first and last token.

The log is run through the same steps in virtual time, and the cost is sought under which it comes out as it was. The
cost is a line: so long for each step, prompt token, sequence, token of context and attention pair. A log tells these
apart only as far as its load varied, so they are held near the proportions that a GPU's arithmetic gives them.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import qmc

from tenuto.batching.core.step_scheduler import UNLIMITED, StepLimits
from tenuto.batching.virtual.virtual_steps import VirtualSteps, run_log
from tenuto.profiles import Generation, StepCost, StepsAt
from tenuto.profiles.generation import pairs_of

Array = NDArray[np.float64]

# Derived: the proportions of a step's costs on GPUs with 16-bit weights, for a model of P parameters. Reading the
# weights takes 2P/bandwidth; a prompt token computes 2P/(operations per second), and GPUs do 100 to 300 operations in
# the time of a byte: 0.005 of it. A sequence computes the same and is sampled. A token of context is read once, 128 KiB
# of 16 GB (Llama 3.1 8B): 8e-6. A pair computes 4 * layers * width of 2P operations: 3e-5 of a prompt token.
_PROPORTIONS = (5e-3, 3e-3, 8e-6, 3e-5)
_SPREAD = (0.7, 1.0, 0.7, 0.7)  # derived: of their logarithms; GPUs, models and engines differ by a factor of two
# Limit: residuals that count as one. Four figures are of one request, and requests that run at once are late together.
_ALIKE = 15.0
_ANOTHER = 2.0  # derived: Akaike's price of another parameter; vLLM decides ahead unless it is told not to
_LEAST = 1e-6  # limit: residuals of a thousandth are rounding
_OF_EACH, _OF_MEAN = 0.5, 2.0  # limit: weights of a request's residual and of the mean, which is what is judged
_SAMPLES = 256  # limit: costs that are tried before the best are improved
_IMPROVED = 2  # limit: of these
_SCALES = (0.3, 1.0, 1.0, 1.0, 1.0, 0.1)  # limit: of the search's first steps
_LEAST_STEP = 1e-3  # limit: of logarithms; a search that has become so narrow is over
_FAR = 10.0  # limit: of one residual
_SIMULATED = 900_000  # limit: requests simulated for one fit
_WAITS_FROM = 30.0  # limit: times TPOT; a prompt of 30,000 tokens is read in as many steps of 2,048
_SEEN = 20  # limit: sequences, before a limit is believed
_ENOUGH = 60  # limit: a log of fewer requests gets a warning


@dataclass(frozen=True)
class ServedLog:
    """Requests in order of arrival. Times are ms."""

    queued_ms: Array
    prompt_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]
    first_ms: Array
    last_ms: Array

    def __len__(self) -> int:
        return len(self.queued_ms)

    @property
    def columns(self) -> tuple[NDArray[Any], ...]:
        """The columns, in the order of the fields."""
        return self.queued_ms, self.prompt_tokens, self.output_tokens, self.first_ms, self.last_ms

    def figures(self, first_ms: Array, last_ms: Array) -> tuple[Array, Array, Array]:
        """Return TTFT, TPOT (of requests with several tokens) and latency in ms."""
        several = self.output_tokens > 1
        tpot = (last_ms - first_ms)[several] / (self.output_tokens[several] - 1)
        return first_ms - self.queued_ms, tpot, last_ms - self.queued_ms


@dataclass(frozen=True)
class Fitted:
    """The cost that was found, how far the log's means are off with it (percent), and what the log cannot tell."""

    generation: Generation
    errors_pct: dict[str, float]
    max_sequences: int
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Setting:
    """What is not a matter of degree."""

    max_sequences: int
    decided_ahead: bool
    goes_on: bool  # the log is part of a load that went on
    has_memory_limit: bool


@dataclass
class _Fit:
    log: ServedLog
    max_batch_tokens: int
    use_tokens: float  # most tokens in memory at once, as the log shows
    left: int  # requests that may still be simulated

    def simulated(self, setting: _Setting, point: Array) -> tuple[Array, Array]:
        """Return the times of first and last tokens with a cost."""
        log, count = self.log, len(self.log)
        kv_tokens = int(math.exp(point[5])) if setting.has_memory_limit else UNLIMITED
        limits = StepLimits(setting.max_sequences, self.max_batch_tokens, kv_tokens)
        cost = StepCost.line(*np.exp(point[:5]))
        replica = VirtualSteps(limits, cost, decided_ahead=setting.decided_ahead)
        prompts, outputs = log.prompt_tokens, log.output_tokens
        # The first request meets an engine that is idle; what it waits beyond its steps is the engine's first use.
        alone_ms = _alone_ms(cost, int(prompts[0]), self.max_batch_tokens)
        cold_ms = max(0.0, float(log.first_ms[0] - log.queued_ms[0]) - alone_ms)
        at = np.maximum(log.queued_ms, log.queued_ms[0] + cold_ms)
        if setting.goes_on and count > 1:
            span = float(log.queued_ms[-1] - log.queued_ms[0])
            at = np.concatenate([at, at + span + span / (count - 1)])
            prompts, outputs = np.concatenate([prompts, prompts]), np.concatenate([outputs, outputs])
        first, last = run_log(at.tolist(), prompts.tolist(), outputs.tolist(), replica, until=count)
        return first[:count], last[:count]

    def loss(self, setting: _Setting, point: Array) -> float:
        """Return how unlikely a cost is, as twice the negative logarithm of its probability but for a constant.

        Residuals are relative to what is judged, and normal with a spread that is not known; so are the proportions,
        with the spreads that GPUs have. So a log that the steps explain well decides alone, and one that is a matter of
        chance, as when memory runs out, does not.
        """
        self.left -= len(self.log)
        first, last = self.simulated(setting, point)
        unlikely = 0.0
        measured = self.log.figures(self.log.first_ms, self.log.last_ms)
        for mine, real in zip(self.log.figures(first, last), measured, strict=True):
            if len(real):
                off = np.nan_to_num(np.clip((mine - real) / real.mean(), -_FAR, _FAR), nan=_FAR)
                square = (_OF_EACH * _OF_EACH) * float(np.mean(off * off)) + (_OF_MEAN * float(off.mean())) ** 2
                unlikely += len(self.log) / _ALIKE * math.log(_LEAST + square)
        # First tokens that came soon say what a prompt costs, and count little in the mean where others waited.
        ttft = np.log(np.maximum(first - self.log.queued_ms, 1e-3) / measured[0])
        ttft = np.nan_to_num(np.clip(ttft, -_FAR, _FAR), nan=_FAR)
        unlikely += len(self.log) / _ALIKE * math.log(_LEAST + _OF_EACH**2 * float(np.mean(ttft * ttft)))
        away = (_shape(point) - np.log(_PROPORTIONS)) / _SPREAD
        unlikely += float(away @ away)
        return unlikely if setting.decided_ahead else unlikely + _ANOTHER


def _alone_ms(cost: StepCost, prompt_tokens: int, max_batch_tokens: int) -> float:
    """Return how long a prompt takes that is read with nothing beside it."""
    chunks = [(done, min(max_batch_tokens, prompt_tokens - done)) for done in range(0, prompt_tokens, max_batch_tokens)]
    return sum(cost.ms(tokens, attention_pairs=pairs_of(tokens, done)) for done, tokens in chunks)


def _shape(point: Array) -> Array:
    step, prompt, sequence, context, pair = point[:5]
    return np.array([prompt - step, sequence - step, context - step, pair - prompt])


def fit_requests(
    log: ServedLog,
    *,
    max_sequences: int | None = None,
    max_batch_tokens: int = 2048,
    kv_tokens: int | None = None,
    rounds: int = 60,
) -> Fitted:
    """Return what steps cost by a log.

    Args:
        log: requests with the moments of their first and last tokens.
        max_sequences: the engine's limit; None: found out, at most 256.
        max_batch_tokens: the engine's limit.
        kv_tokens: tokens that the memory holds; None: found out.
        rounds: of each search; with fewer it is over sooner, and less exact.
    """
    used, running = _in_use(log)
    least = float((log.prompt_tokens + log.output_tokens).max())
    fit = _Fit(log, max_batch_tokens, max(float(used.max()), least), _SIMULATED)
    most, waits = int(running.max()), _waits(log)
    is_full = _is_full(log, running, waits)
    if max_sequences is None:
        max_sequences = most if is_full else max(256, most)
    # Sequences that wait while there are places for them wait for memory, or for prompts before them.
    limited = [True] if kv_tokens is not None else ([False, True] if waits.any() and not is_full else [False])
    settings = [_Setting(max_sequences, True, goes_on, limit) for goes_on in (True, False) for limit in limited]
    shapes = np.log(_PROPORTIONS) + np.array(_SPREAD) * 2.0 * (2.0 * qmc.Sobol(5, seed=0).random(_SAMPLES)[:, :4] - 1.0)
    memory = qmc.Sobol(1, seed=1).random(_SAMPLES)[:, 0]
    best: dict[_Setting, tuple[float, Array]] = {}
    for place, shape in enumerate(shapes):
        setting = settings[place % len(settings)]
        kv = math.log(kv_tokens) if kv_tokens is not None else math.log(fit.use_tokens) + 0.35 * memory[place] - 0.3
        point = np.append(_scaled(log, shape, used, running), kv)
        loss = fit.loss(setting, point)
        if setting not in best or loss < best[setting][0]:
            best[setting] = (loss, point)
        if fit.left < _SIMULATED * 0.7:
            break
    moves_memory = kv_tokens is None
    ranked = sorted(best.items(), key=lambda item: item[1][0])[:_IMPROVED]
    searches = [_Search(fit, setting, point, moves_memory) for setting, (_, point) in ranked]
    for search in searches:
        search.run(rounds)
    search = min(searches, key=lambda search: search.best[0])
    at_once = _Search(fit, replace(search.setting, decided_ahead=False), search.best[1], moves_memory, 0.1)
    at_once.run(rounds // 2)
    search = min(search, at_once, key=lambda search: search.best[0])
    search.run(rounds)
    setting, point = search.setting, search.best[1]
    return _told(fit, setting, point, kv_tokens)


class _Search:
    """CMA-ES (Hansen, The CMA evolution strategy: a tutorial, 2016) from a point. It needs no slopes: the
    times have none, as steps are whole. `best` is the least loss so far, and its point."""

    def __init__(self, fit: _Fit, setting: _Setting, point: Array, moves_memory: bool, step: float = 0.4) -> None:
        self.setting, self._fit, self._rest = setting, fit, point
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # cma would draw with matplotlib
            import cma
        self._moved = count = 6 if setting.has_memory_limit and moves_memory else 5
        self.best = (fit.loss(setting, point), point)
        generator = np.random.default_rng(0)
        self._strategy = cma.CMAEvolutionStrategy(
            point[:count],
            step,
            {
                "CMA_stds": _SCALES[:count],
                "popsize": 7 + int(3 * math.log(count)),
                "randn": lambda *shape: generator.standard_normal(shape),
                "seed": math.nan,  # the numbers are those of the generator above
                "verbose": -9,
            },
        )

    def run(self, rounds: int) -> None:
        """Do so many rounds, as far as the limit of simulated requests allows."""
        for _ in range(rounds):
            if self._fit.left <= 0 or self._strategy.sigma < _LEAST_STEP:
                return
            points = self._strategy.ask()
            wholes = [np.append(point, self._rest[self._moved :]) for point in points]
            losses = [self._fit.loss(self.setting, whole) for whole in wholes]
            self._strategy.tell(points, losses)
            self.best = min(self.best, *zip(losses, wholes, strict=True), key=lambda pair: pair[0])


def _scaled(log: ServedLog, shape: Array, used: Array, running: Array) -> Array:
    """Return a cost of these proportions under which the mean TPOT is that of the log, by a rough count."""
    prompt, sequence, context, pair = np.exp(shape)
    several = log.output_tokens > 1
    if several.any():
        steps = (log.output_tokens - 1)[several]
        tpot = ((log.last_ms - log.first_ms)[several] / steps).mean()
        between = (log.first_ms[None] > log.first_ms[several, None]) & (
            log.first_ms[None] <= log.last_ms[several, None]
        )
        read = float(((log.prompt_tokens[None] * between).sum(1) / steps).mean())
        step = tpot / (1.0 + prompt * read + sequence * running.mean() + context * used.mean())
    else:
        step = float((log.first_ms - log.queued_ms).min()) / (1.0 + prompt * float(log.prompt_tokens.mean()))
    step = max(float(step), 1e-3)
    return np.log([step, step * prompt, step * sequence, step * context, step * prompt * pair])


def _in_use(log: ServedLog) -> tuple[Array, Array]:
    """Return the tokens in memory, and the sequences that decode, when each request has its first token."""
    at = log.first_ms[:, None]
    runs = (log.first_ms[None] <= at) & (at <= log.last_ms[None])
    part = (at - log.first_ms[None]) / np.maximum(log.last_ms - log.first_ms, 1e-9)[None]
    tokens = log.prompt_tokens[None] + log.output_tokens[None] * np.clip(part, 0.0, 1.0)
    return (tokens * runs).sum(axis=1), runs.sum(axis=1).astype(np.float64)


def _waits(log: ServedLog) -> NDArray[np.bool_]:
    """Return which requests waited for others to end: their first token took as long as many further ones."""
    ttft, tpot, _ = log.figures(log.first_ms, log.last_ms)
    found: NDArray[np.bool_] = ttft > (_WAITS_FROM * float(np.median(tpot)) if len(tpot) else math.inf)
    return found


def _is_full(log: ServedLog, running: Array, waits: NDArray[np.bool_]) -> bool:
    """Return whether sequences waited for one of so many places.

    Then about as many run whenever one that waited begins; or, where prompts made others wait before, once as many run
    as ever. Where sequences wait for memory, how many run depends on how long those are that do.
    """
    if not waits.any():
        return False
    most = float(running.max())
    in_order = running[np.argsort(log.first_ms)]
    then = in_order[np.argmax(in_order >= 0.95 * most) :]
    if len(then) >= _SEEN and float(np.median(then)) >= most - 1:
        return True
    return float(np.percentile(running[waits], 25)) >= 0.95 * most


def _told(fit: _Fit, setting: _Setting, point: Array, kv_tokens: int | None) -> Fitted:
    log = fit.log
    first, last = fit.simulated(setting, point)
    measured = log.figures(log.first_ms, log.last_ms)
    names = ("ttft", "tpot", "latency")
    errors = {
        name: round(100.0 * (float(mine.mean()) / float(real.mean()) - 1.0), 3)
        for name, mine, real in zip(names, log.figures(first, last), measured, strict=True)
        if len(real)
    }
    doubts = []
    if len(log) < _ENOUGH:
        doubts.append(f"the log has {len(log)} requests; {_ENOUGH} and more tell the costs apart")
    used, running = _in_use(log)
    if running.max() < 2:
        doubts.append("no two requests ran at once: what a sequence and its context cost is guessed by proportion")
    elif running.max() < 2.0 * max(1.0, float(running.min())):
        doubts.append("the load hardly varied: costs of a step and of a sequence are hard to tell apart")
    if not setting.has_memory_limit:
        doubts.append(
            f"memory never ran out: it holds at least {int(used.max()):,} tokens; say how many with --kv-tokens"
        )
    if _waits(log)[0]:
        waited_s = float(log.first_ms[0] - log.queued_ms[0]) / 1000.0
        doubts.append(f"the first request waited {waited_s:.1f} s: begin the log when nothing runs, with a warm engine")
    worst = max(abs(error) for error in errors.values())
    if worst > 5.0:
        doubts.append(f"the log does not come out as it was: a mean is off by {worst:.0f} %; check the limits given")
    steps = StepsAt.model_validate(_rounded(StepCost.line(*np.exp(point[:5]))).model_dump())
    kv = kv_tokens or (int(math.exp(point[5])) if setting.has_memory_limit else None)
    generation = Generation(
        kv_tokens=kv,
        decided_ahead=setting.decided_ahead,
        steps=(steps,),
        errors={f"{name}_pct": error for name, error in errors.items()},
    )
    return Fitted(generation, errors, setting.max_sequences, tuple(doubts))


def _rounded(cost: StepCost) -> StepCost:
    def short(knots: Sequence[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
        return tuple((amount, float(f"{ms:.7g}")) for amount, ms in knots)

    return cost.model_copy(
        update={
            "prefill_ms": short(cost.prefill_ms),
            "decode_ms": short(cost.decode_ms),
            "context_token_ms": float(f"{cost.context_token_ms:.7g}"),
            "attention_pair_ms": float(f"{cost.attention_pair_ms:.7g}"),
        }
    )
