"""Ray's authentication token: where it is, and that there is one before a Ray is started here.

Whoever can talk to a Ray cluster can run code on it (its job agent takes commands), so the token is what stands between
a process of another user, or another machine, and a shell. Ray reads it from RAY_AUTH_TOKEN, else from the file that
RAY_AUTH_TOKEN_PATH names, else from `~/.ray/auth_token`; RAY_AUTH_MODE=disabled turns it off.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path
from typing import Literal

from tenuto.documents import write_whole

_TOKEN_BYTES = 32  # limit: 256 bits, which nobody guesses
_ALIVE = "/ray.rpc.NodeInfoGcsService/CheckAlive"  # asks Ray's head nothing, and changes nothing

# What a Ray does with who comes with our token, or without one: `open` takes everybody, `ours` takes our token,
# `theirs` wants another, `closed` wants one and was not shown ours; `unknown` is no Ray, or one behind TLS.
Guard = Literal["open", "ours", "theirs", "closed", "unknown"]


def token_file() -> Path | None:
    """Return the file that holds the token, whether or not it exists; None where the environment has the token."""
    if os.environ.get("RAY_AUTH_TOKEN"):
        return None
    named = os.environ.get("RAY_AUTH_TOKEN_PATH")
    return Path(named) if named else Path.home() / ".ray" / "auth_token"


def token() -> str:
    """Return the token; empty where there is none, or where it cannot be read."""
    given, file = os.environ.get("RAY_AUTH_TOKEN", ""), token_file()
    if file is None:
        return given.strip()
    try:
        return file.read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def guard_of(address: str, *, shows_token: bool = True, timeout_s: float = 5.0) -> Guard:
    """Return what the Ray at `host:port` asks for; `shows_token`: whether it may see ours."""
    import grpc

    def is_let_in(metadata: tuple[tuple[str, str], ...]) -> bool | None:
        with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
            try:
                channel.unary_unary(_ALIVE)(b"", timeout=timeout_s, metadata=metadata)
            except grpc.RpcError as error:
                refusals = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)
                return False if error.code() in refusals else None
        return True

    without = is_let_in(())
    if without is None:
        return "unknown"
    if without:
        return "open"
    if not shows_token:
        return "closed"
    own = token()
    return "ours" if own and is_let_in((("authorization", f"Bearer {own}"),)) else "theirs"


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
    if file.exists():
        return
    new = file.with_name(f"{file.name}.{os.getpid()}")
    write_whole(new, secrets.token_hex(_TOKEN_BYTES), mode=0o600)
    with contextlib.suppress(FileExistsError):  # unlike a rename, a link leaves the token that another process made
        os.link(new, file)
    new.unlink()


def readable_by_others(file: Path) -> bool:
    """Whether other users of this machine can read a file."""
    return bool(file.stat().st_mode & 0o044)
