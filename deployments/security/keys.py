"""API keys: which client a request comes from, which models the client may ask for, and how often.

Only hashes are kept. A key is 256 random bits, which nobody can guess, so a plain SHA-256 is as good as a slow hash. To
look a key up takes a hash and a dictionary, once per connection and head.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated

from pydantic import Field, field_validator

from tenuto.documents import Fault, StrictModel, load_document, parse_document, repeated
from tenuto.errors import Problem, raise_if_any

ENVIRONMENT = "TENUTO_API_KEYS"
_PREFIX = "tenuto_"  # lets scanners for leaked secrets find keys
_MOST_KEY_BYTES = 512  # limit: bytes of a key in a head
_RECENT_WEIGHT = 0.5  # derived: weight of the last second in a mean, so that two seconds weigh three quarters
_CLAIMED_S = (
    60.0  # limit: what answers under way may cost beyond the rate; a minute, in which other services count tokens
)
_LEAST_PART = 0.01  # fitted: the part of a key's rate that every gateway may use, whatever the other gateways get


class KeyEntry(StrictModel):
    """One client. `sha256`: the hash of its key, in hex. `models`: names of models, or patterns with `*`. `rate_rps`:
    the most requests per second on average (absent: no limit). `burst`: the most at once (default: a second's worth).
    `tokens_per_s`: the most tokens per second on average that models read and write for it (absent: no limit).
    `offline`: its requests may cost no other one its deadline, and have none of their own."""

    name: Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[\w.-]+$")]
    sha256: str
    models: tuple[str, ...] = ("*",)
    rate_rps: Annotated[float, Field(gt=0, le=1e9)] | None = None
    burst: Annotated[int, Field(ge=1, le=10**9)] | None = None
    tokens_per_s: Annotated[float, Field(gt=0, le=1e9)] | None = None
    offline: bool = False

    @property
    def is_limited(self) -> bool:
        """Whether it may not ask for as much as it likes."""
        return self.rate_rps is not None or self.tokens_per_s is not None

    @field_validator("sha256")
    @classmethod
    def _is_a_hash(cls, value: str) -> str:
        if len(value) != 64 or set(value.lower()) - set("0123456789abcdef"):
            raise Fault("is not the SHA-256 of a key in hex", "`tenuto key NAME` makes a key and its entry.")
        return value.lower()


class KeyFile(StrictModel):
    """The file that holds the clients' hashes."""

    keys: tuple[KeyEntry, ...] = ()


def new_key() -> tuple[str, str]:
    """Return a new key and its SHA-256 in hex."""
    key = _PREFIX + secrets.token_urlsafe(32)
    return key, hashlib.sha256(key.encode()).hexdigest()


def read_keys(file: str | Path | None) -> tuple[KeyEntry, ...]:
    """Return the clients of a file and of TENUTO_API_KEYS (`NAME:SHA256,NAME:SHA256`).

    Raises:
        InvalidInputError: lists every problem; one problem is two clients with the same name or key.
    """
    entries: list[KeyEntry] = []
    if file is not None:
        entries += parse_document(KeyFile, load_document(file), origin=str(file)).keys
    given = [part for part in os.environ.get(ENVIRONMENT, "").split(",") if part.strip()]
    if given:
        pairs = [part.strip().partition(":") for part in given]
        named = {"keys": [{"name": name, "sha256": digest} for name, _, digest in pairs]}
        entries += parse_document(KeyFile, named, origin=ENVIRONMENT).keys
    raise_if_any(_twice("name", [entry.name for entry in entries]))
    raise_if_any(_twice("sha256", [entry.sha256 for entry in entries]))
    return tuple(entries)


def _twice(key: str, values: Sequence[str]) -> Iterable[Problem]:
    for value in repeated(values):
        yield Problem(f"keys.{key}", value, "is given twice", "Give every client a name and a key of its own.")


def presented_key(headers: Mapping[bytes, bytes]) -> bytes | None:
    """Return the key in `Authorization: Bearer KEY` or `X-Api-Key: KEY`; None if there is neither."""
    bearer = headers.get(b"authorization")
    if bearer is not None and bearer[:7].lower() == b"bearer ":
        return bearer[7:].strip()
    return headers.get(b"x-api-key")


class Caller:
    """A client that has shown its key. There is one object per client, so that all its connections share its rate.

    When several gateways serve, each gives out a part of the rate: the more the client asks there, the more; see
    `share`.
    """

    def __init__(self, entry: KeyEntry) -> None:
        """Take an entry of the key file; the bucket is full."""
        self.entry = entry
        self.asked_rps = 0.0  # requests per second to this gateway in the last seconds, refused ones included
        self._asked = 0  # requests since the last `share`
        self._part, self._gateways = 1.0, 1
        self._burst = float(entry.burst or max(1.0, entry.rate_rps or 1.0))
        self._tokens = self._burst
        self._filled_s = 0.0
        self._text = entry.tokens_per_s or 0.0  # tokens that models may read and write now; a second's worth at most
        self._text_filled_s = 0.0
        self._claimed = 0  # tokens that answers under way may still come to have

    @property
    def name(self) -> str:
        """The client's name in the key file."""
        return self.entry.name

    def may_ask(self, model: str) -> bool:
        """Whether the client may ask for a model."""
        return any(fnmatchcase(model, pattern) for pattern in self.entry.models)

    def wait_s(self, now_s: float) -> float:
        """Take a token for one request; return 0, or how long to wait for a token if there is none."""
        self._asked += 1
        if self.entry.rate_rps is None:
            return 0.0
        rate = self.entry.rate_rps * self._part
        most = max(1.0, self._burst / self._gateways)
        self._tokens = min(most, self._tokens + rate * max(0.0, now_s - self._filled_s))
        self._filled_s = now_s
        if self._tokens >= 1.0:
            self._tokens -= 1.0
            return 0.0
        return (1.0 - self._tokens) / rate

    def text_wait_s(self, now_s: float, most: int) -> float:
        """Return how long to wait until models may read and write for this client again; 0 where they may now.

        Answers under way may come to cost what the rate gives in a minute: whoever asks for many at once is told to
        wait. One answer alone may cost more.

        Args:
            now_s: the clock.
            most: tokens of the prompt and of the longest answer.
        """
        if self.entry.tokens_per_s is None:
            return 0.0
        rate = self.entry.tokens_per_s * self._part
        self._text = min(rate, self._text + rate * max(0.0, now_s - self._text_filled_s))
        self._text_filled_s = now_s
        if self._text <= 0.0:
            return (1.0 - self._text) / rate
        beyond = self._claimed + most - _CLAIMED_S * rate if self._claimed else 0.0
        return max(0.0, min(beyond / rate, _CLAIMED_S))

    def begin_text(self, prompt: int, most: int) -> None:
        """Note that a model reads a prompt of so many tokens, and may write `most`."""
        self._text -= prompt
        self._claimed += most

    def spend_text(self) -> None:
        """Note that a model has written a token. What is begun goes on, and later requests wait for it."""
        self._text -= 1.0
        self._claimed -= 1

    def end_text(self, left: int) -> None:
        """Note that an answer is over that might have had so many tokens more."""
        self._claimed -= left

    def count(self, seconds: float) -> None:
        """Update `asked_rps` by the requests since the last call, `seconds` ago."""
        self.asked_rps += _RECENT_WEIGHT * (self._asked / seconds - self.asked_rps)
        self._asked = 0

    def share(self, asked_rps: Sequence[float]) -> None:
        """Set this gateway's part of the rate: the part of the client's requests that come to this gateway.

        The parts of all gateways add up to one if all know the same figures. A gateway that gets no requests keeps a
        hundredth, so that the first request there is answered.

        Args:
            asked_rps: the client's requests per second to each gateway, with this one among them.
        """
        if not self.entry.is_limited:
            return
        least_rps = _LEAST_PART * (self.entry.rate_rps or 1.0)
        others_rps = sum(asked_rps) - self.asked_rps
        self._gateways = max(1, len(asked_rps))
        here_rps = self.asked_rps + least_rps
        self._part = here_rps / (here_rps + max(0.0, others_rps) + (self._gateways - 1) * least_rps)


class Callers:
    """All clients by the hash of their keys."""

    def __init__(self, entries: Sequence[KeyEntry] = ()) -> None:
        """Take the entries of the key file."""
        self._by_hash = {entry.sha256: Caller(entry) for entry in entries}

    def follow(self, entries: Sequence[KeyEntry]) -> None:
        """Take a changed key file. Clients with an unchanged entry keep their tokens."""
        old = self._by_hash
        self._by_hash = {}
        for entry in entries:
            known = old.get(entry.sha256)
            self._by_hash[entry.sha256] = known if known is not None and known.entry == entry else Caller(entry)

    def count(self, seconds: float) -> dict[str, float]:
        """Return recent requests per second to this gateway, by client, for clients with a limit.

        Args:
            seconds: the time since the last call.
        """
        limited = [caller for caller in self._by_hash.values() if caller.entry.is_limited]
        for caller in limited:
            caller.count(seconds)
        return {caller.name: caller.asked_rps for caller in limited}

    def share(self, asked_rps: Sequence[Mapping[str, float]]) -> None:
        """Share the rates with the other gateways; see `Caller.share`.

        Args:
            asked_rps: the results of `count` at all gateways.
        """
        for caller in self._by_hash.values():
            caller.share([asked.get(caller.name, 0.0) for asked in asked_rps])

    def __bool__(self) -> bool:
        return bool(self._by_hash)

    def find(self, key: bytes) -> Caller | None:
        """Return the client with this key; None if there is none."""
        if len(key) > _MOST_KEY_BYTES:
            return None
        return self._by_hash.get(hashlib.sha256(key).hexdigest())
