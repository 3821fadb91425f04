"""API keys: who a client is, which models it may ask for, and how often.

Only hashes are kept. Keys are 256 random bits, so that a plain SHA-256 is as good as a slow hash: there is nothing to
guess. Looking one up takes a hash and a dictionary, and happens once per connection and head.
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

from tenuto.documents import Fault, StrictModel, load_document, parse_document
from tenuto.errors import Problem, raise_if_any

ENVIRONMENT = "TENUTO_API_KEYS"
_PREFIX = "tenuto_"  # lets scanners for leaked secrets find one
_MOST_KEY_BYTES = 512  # limit: of a key in a head
_RECENT_WEIGHT = 0.5  # derived: two seconds make three quarters; part of the last second
_LEAST_PART = 0.01  # limit: of a key's rate that every gateway may use, whatever the others are asked


class KeyEntry(StrictModel):
    """One client. `sha256`: of its key, in hex. `models`: names, or patterns with `*`. `rate_rps`: requests per second,
    on average, with as many as `burst` at once (default: a second's worth); none where absent."""

    name: Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[\w.-]+$")]
    sha256: str
    models: tuple[str, ...] = ("*",)
    rate_rps: Annotated[float, Field(gt=0, le=1e9)] | None = None
    burst: Annotated[int, Field(ge=1, le=10**9)] | None = None

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
        InvalidInputError: with every problem found; two clients of one name or one key are one.
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
    for value in sorted({value for value in values if values.count(value) > 1}):
        yield Problem(f"keys.{key}", value, "is given twice", "Give every client a name and a key of its own.")


def presented_key(headers: Mapping[bytes, bytes]) -> bytes | None:
    """Return the key in `Authorization: Bearer KEY` or `X-Api-Key: KEY`; None where neither is there."""
    bearer = headers.get(b"authorization")
    if bearer is not None and bearer[:7].lower() == b"bearer ":
        return bearer[7:].strip()
    return headers.get(b"x-api-key")


class Caller:
    """A client that has shown its key. One object per client, so that all its connections share its rate.

    Where several gateways serve, each gives out a part of the rate, which follows where the client asks; see `share`.
    """

    __slots__ = ("_asked", "_burst", "_filled_s", "_gateways", "_part", "_tokens", "asked_rps", "entry")

    def __init__(self, entry: KeyEntry) -> None:
        """Take an entry of the key file; the bucket is full."""
        self.entry = entry
        self.asked_rps = 0.0  # here, in the last seconds, what was refused among it
        self._asked = 0  # since the last `share`
        self._part, self._gateways = 1.0, 1
        self._burst = float(entry.burst or max(1.0, entry.rate_rps or 1.0))
        self._tokens = self._burst
        self._filled_s = 0.0

    @property
    def name(self) -> str:
        """What the key file calls it."""
        return self.entry.name

    def may_ask(self, model: str) -> bool:
        """Whether a model is among those of its key."""
        return any(fnmatchcase(model, pattern) for pattern in self.entry.models)

    def wait_s(self, now_s: float) -> float:
        """Take one request from the bucket; return 0, or how long to wait for one where it is empty."""
        if self.entry.rate_rps is None:
            return 0.0
        self._asked += 1
        rate = self.entry.rate_rps * self._part
        most = max(1.0, self._burst / self._gateways)
        self._tokens = min(most, self._tokens + rate * max(0.0, now_s - self._filled_s))
        self._filled_s = now_s
        if self._tokens >= 1.0:
            self._tokens -= 1.0
            return 0.0
        return (1.0 - self._tokens) / rate

    def count(self, seconds: float) -> None:
        """Take note of how often it asked since the last call, `seconds` ago."""
        self.asked_rps += _RECENT_WEIGHT * (self._asked / seconds - self.asked_rps)
        self._asked = 0

    def share(self, asked_rps: Sequence[float]) -> None:
        """Take the part of the rate that belongs to this gateway: as much as it is asked here of all that is asked.

        The parts of all gateways add up to one where all know the same; who is not asked keeps a hundredth, so that the
        first request there is answered.

        Args:
            asked_rps: how often it asks each gateway, this one among them.
        """
        if self.entry.rate_rps is None:
            return
        least_rps = _LEAST_PART * self.entry.rate_rps
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
        """Take the key file anew; clients whose entry is the same keep what they have left of their rate."""
        old = self._by_hash
        self._by_hash = {}
        for entry in entries:
            known = old.get(entry.sha256)
            self._by_hash[entry.sha256] = known if known is not None and known.entry == entry else Caller(entry)

    def count(self, seconds: float) -> dict[str, float]:
        """Return how often each client with a rate asked here lately, per second, by its name.

        Args:
            seconds: since the last call.
        """
        limited = [caller for caller in self._by_hash.values() if caller.entry.rate_rps is not None]
        for caller in limited:
            caller.count(seconds)
        return {caller.name: caller.asked_rps for caller in limited}

    def share(self, asked_rps: Sequence[Mapping[str, float]]) -> None:
        """Share the rates with the other gateways; see `Caller.share`.

        Args:
            asked_rps: what `count` returned at every gateway.
        """
        for caller in self._by_hash.values():
            caller.share([asked.get(caller.name, 0.0) for asked in asked_rps])

    def __bool__(self) -> bool:
        return bool(self._by_hash)

    def find(self, key: bytes) -> Caller | None:
        """Return who shows a key; None for one that nobody has."""
        if len(key) > _MOST_KEY_BYTES:
            return None
        return self._by_hash.get(hashlib.sha256(key).hexdigest())
