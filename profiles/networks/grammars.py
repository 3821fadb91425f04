"""JSON schemas that answers keep, by the package llguidance: which schemas can be kept, and which tokens may come next.

The package is optional, and nothing of it is imported before it is needed. A client chooses a schema, so that its cost
has bounds: `SchemaHooks` prepares it in a process that can be killed, before a gpu-let does, and a step's mask has
limits of its own.
"""

from __future__ import annotations

import signal
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np

from tenuto.errors import EnvironmentFaultError, InvalidInputError, first_line, refused
from tenuto.profiles.networks.catalogue import ModelSignature, TensorSignature
from tenuto.profiles.networks.import_factory import check_path
from tenuto.profiles.networks.tokenizer_files import BYTE_TOKENIZER, tokenizer_file

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

ANY_OBJECT = '{"type":"object"}'
SCHEMA_HOOKS = "tenuto.profiles.networks.grammars:SchemaHooks"
CHECKED_S = 1.0  # limit: processor time to prepare a schema; 200 properties take 0.02 s, and some schemas minutes
_PREPARED_S = 10.0 * CHECKED_S  # limit: the wait for the same on a gpu-let, which is busy
# limit: of one mask, about 7 ms (the package's own figures: 14,000 a ms of the one, 20,000 a ms of the other)
_STEP_FUEL, _STEP_ITEMS = 100_000, 20_000
NEEDED = "needs the package 'llguidance'. Run: pip install 'tenuto[structured]'"


class GrammarError(Exception):
    """A sequence cannot go on by its schema. The text says why."""


class Grammar:
    """The schema of one sequence, and how far its text has come."""

    def __init__(self, matcher: Future[LLMatcher]) -> None:
        self._future = matcher
        self.is_complete = False  # nothing but the end of the text can follow

    def allowed(self) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Return, for every token, whether it may come next; the array may be longer or shorter than the vocabulary.

        Raises:
            GrammarError: the schema cannot be kept any further, as that would cost too much.
        """
        matcher = self._matcher()
        mask = matcher.compute_bitmask()
        self._check(matcher)
        return np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little").view(np.bool_)

    def may_end(self) -> bool:
        """Return whether the text so far keeps the schema as a whole."""
        return bool(self._matcher().is_accepting())

    def take(self, token: int) -> None:
        """Go on behind a token that is not the end; raises `GrammarError` when it may not come next."""
        matcher = self._matcher()
        matcher.consume_token(token)
        self._check(matcher)
        self.is_complete = matcher.is_stopped()

    def cancel(self) -> None:
        """Do not prepare it any more, unless that has begun."""
        self._future.cancel()

    def _matcher(self) -> LLMatcher:
        try:
            return self._future.result(_PREPARED_S)
        except TimeoutError:
            raise GrammarError(f"its schema was not prepared within {_PREPARED_S:g} s") from None

    @staticmethod
    def _check(matcher: LLMatcher) -> None:
        if matcher.is_error():
            raise GrammarError(f"its schema cannot be kept ({_short(matcher.get_error())})")


class Grammars:
    """Prepares schemas for one model, on a thread of its own: that lets go of the interpreter.

    `ends` are the tokens that end a text here; a tokenizer may have one where the model has none.
    """

    def __init__(self, tokenizer: str, vocabulary: int, ends: Collection[int]) -> None:
        """Read the tokenizer.

        Args:
            tokenizer: a folder that `save_pretrained` wrote, a `tokenizer.json`, or `bytes`.
            vocabulary: how many tokens the model knows.
            ends: the tokens that end a text.

        Raises:
            EnvironmentFaultError: the package is not installed.
            InvalidInputError: the tokenizer cannot be read.
        """
        self._tokenizer = _tokenizer(tokenizer, vocabulary, ends)
        self.ends = frozenset(self._tokenizer.eos_tokens)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammars")

    def begin(self, schema: str, made: Sequence[int] = ()) -> Grammar:
        """Return the grammar of a sequence that has already `made` these tokens."""
        return Grammar(self._thread.submit(_prepared, self._tokenizer, schema, list(made)))

    def close(self) -> None:
        """End the thread; nothing waits for it."""
        self._thread.shutdown(wait=False, cancel_futures=True)


class SchemaHooks:
    """Says of a schema whether it can be kept, in a process of hooks, which ends when that takes more than
    `CHECKED_S`."""

    signature = ModelSignature("tensor", (TensorSignature("checked", "uint8", (1,)),), ())

    def __init__(self, signature: ModelSignature) -> None:
        del signature
        self._tokenizer = _tokenizer(BYTE_TOKENIZER, 256, ())

    def preprocess(self, schema: bytes) -> dict[str, Any]:
        """Prepare a schema; raises `InvalidInputError` when it cannot be kept."""
        signal.setitimer(signal.ITIMER_PROF, CHECKED_S)  # of this process' processor time; its signal kills
        try:
            matcher = _prepared(self._tokenizer, schema.decode(), [])
            matcher.compute_bitmask()
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0.0)
        if matcher.is_error():
            raise InvalidInputError(_short(matcher.get_error()))
        return {"checked": np.ones(1, np.uint8)}

    def postprocess(self, outputs: Mapping[str, Any]) -> None:
        """Do nothing: there is no answer."""
        del outputs


def _prepared(tokenizer: LLTokenizer, schema: str, made: list[int]) -> LLMatcher:
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(step_lexer_fuel=_STEP_FUEL, step_max_items=_STEP_ITEMS, verbose_errors=False)
    try:
        grammar = LLMatcher.grammar_from_json_schema(schema)
    except ValueError as error:
        raise InvalidInputError(_short(str(error))) from error
    matcher = LLMatcher(tokenizer, grammar, limits=limits, log_level=0)
    matcher.consume_tokens(made)
    return matcher


def _short(text: str) -> str:
    return text.strip().partition("\n")[0][:300]


def _tokenizer(place: str, vocabulary: int, ends: Collection[int]) -> LLTokenizer:
    try:
        from llguidance import LLTokenizer, TokenizerWrapper
    except ImportError as error:
        raise EnvironmentFaultError(NEEDED) from error
    if place == BYTE_TOKENIZER:
        return LLTokenizer(TokenizerWrapper(_Bytes(vocabulary, sorted(ends))))
    check_path(place, "tokenizer")
    file = tokenizer_file(place)
    try:
        return LLTokenizer(file.read_text(encoding="utf-8"), eos_token=sorted(ends) or None)
    except OSError as error:
        cure = "Give a folder or a tokenizer.json of the tokenizers library that exists on the gpu-let's node."
        raise refused("tokenizer", str(file), f"cannot be read ({first_line(error)})", cure) from error
    except Exception as error:  # the package raises many
        cure = "Give a tokenizer.json whose decoder is a ByteLevel, or a Sequence that has a ByteFallback."
        raise refused("tokenizer", str(file), f"is none that llguidance knows ({first_line(error)})", cure) from error


class _Bytes:
    """The gateway's tokenizer of bytes as the package reads one. It must have an end of text: where the model has none,
    that is none of the model's tokens."""

    bos_token_id = None

    def __init__(self, vocabulary: int, ends: Sequence[int]) -> None:
        self.special_token_ids = ends or [vocabulary]
        self.eos_token_id = self.special_token_ids[0]
        self.tokens = [bytes([token % 256]) for token in range(vocabulary + (not ends))]  # format: values of a byte

    def __call__(self, text: bytes) -> list[int]:
        return list(text)
