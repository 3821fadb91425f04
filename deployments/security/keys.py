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

from tenuto.documents import StrictModel, load_document, parse_document
from tenuto.errors import Problem, raise_if_any

__all__ = ["ENVIRONMENT", "Caller", "Callers", "KeyEntry", "KeyFile", "new_key", "presented_key", "read_keys"]

ENVIRONMENT = "TENUTO_API_KEYS"
_PREFIX = "tenuto_"  # lets scanners for leaked secrets find one
_MOST_KEY_BYTES = 512


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
            raise ValueError("is not the SHA-256 of a key in hex; `tenuto key NAME` makes a key and its entry")
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
    """A client that has shown its key. One object per client, so that all its connections share its rate."""

    __slots__ = ("_burst", "_filled_s", "_patterns", "_rate_rps", "_tokens", "name")

    def __init__(self, entry: KeyEntry) -> None:
        """Take an entry of the key file; the bucket is full."""
        self.name = entry.name
        self._patterns = entry.models
        self._rate_rps = entry.rate_rps
        self._burst = float(entry.burst or max(1.0, entry.rate_rps or 1.0))
        self._tokens = self._burst
        self._filled_s = 0.0

    def may_ask(self, model: str) -> bool:
        """Whether a model is among those of its key."""
        return any(fnmatchcase(model, pattern) for pattern in self._patterns)

    def wait_s(self, now_s: float) -> float:
        """Take one request from the bucket; return 0, or how long to wait for one where it is empty."""
        rate = self._rate_rps
        if rate is None:
            return 0.0
        self._tokens = min(self._burst, self._tokens + rate * max(0.0, now_s - self._filled_s))
        self._filled_s = now_s
        if self._tokens >= 1.0:
            self._tokens -= 1.0
            return 0.0
        return (1.0 - self._tokens) / rate


class Callers:
    """All clients by the hash of their keys."""

    def __init__(self, entries: Sequence[KeyEntry] = ()) -> None:
        """Take the entries of the key file."""
        self._by_hash = {entry.sha256: Caller(entry) for entry in entries}

    def __bool__(self) -> bool:
        return bool(self._by_hash)

    def find(self, key: bytes) -> Caller | None:
        """Return who shows a key; None for one that nobody has."""
        if len(key) > _MOST_KEY_BYTES:
            return None
        return self._by_hash.get(hashlib.sha256(key).hexdigest())
