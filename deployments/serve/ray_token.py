"""Ray's authentication token: where it is, and that there is one before a Ray is started here.

Whoever can talk to a Ray cluster can run code on it (its job agent takes commands), so the token is what stands between
a process of another user, or another machine, and a shell. Ray reads it from RAY_AUTH_TOKEN, else from the file that
RAY_AUTH_TOKEN_PATH names, else from `~/.ray/auth_token`; RAY_AUTH_MODE=disabled turns it off.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path

__all__ = ["is_refused", "make_token", "readable_by_others", "token_file"]

_TOKEN_BYTES = 32


def token_file() -> Path | None:
    """Return the file that holds the token, whether or not it exists; None where the environment has the token."""
    if os.environ.get("RAY_AUTH_TOKEN"):
        return None
    named = os.environ.get("RAY_AUTH_TOKEN_PATH")
    return Path(named) if named else Path.home() / ".ray" / "auth_token"


def is_refused() -> bool:
    """Whether somebody turned Ray's authentication off in the environment."""
    return os.environ.get("RAY_AUTH_MODE", "").lower() == "disabled"


def make_token() -> None:
    """Write a new token where Ray looks for one and finds none; Ray's own would be readable by everybody.

    Raises:
        OSError: the folder cannot be written.
    """
    file = token_file()
    if file is None or is_refused():
        return
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return
    with os.fdopen(descriptor, "w", encoding="utf-8") as opened:
        opened.write(secrets.token_hex(_TOKEN_BYTES))


def readable_by_others(file: Path) -> bool:
    """Whether other users of this machine can read a file."""
    return bool(file.stat().st_mode & 0o044)
