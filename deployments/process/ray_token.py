"""Ray's authentication token: where it is, and how it is made before a Ray is started here.

Anybody who can talk to a Ray cluster can run code on it, as its job agent takes commands. Only the token keeps
processes of other users and machines from that. Ray reads the token from RAY_AUTH_TOKEN, else from the file that
RAY_AUTH_TOKEN_PATH names, else from `~/.ray/auth_token`. RAY_AUTH_MODE=disabled turns it off.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path
from typing import Literal

from tenuto.documents import write_whole
from tenuto.errors import EnvironmentFaultError

_TOKEN_BYTES = 32  # limit: 256 bits, which nobody can guess
_ALIVE = "/ray.rpc.NodeInfoGcsService/CheckAlive"  # a call that reads nothing and changes nothing

# What a Ray asks of those who connect. `open`: no token. `ours`: our token. `theirs`: another token. `closed`: some
# token, but ours was not shown. `unknown`: it is no Ray, or it is behind TLS.
Guard = Literal["open", "ours", "theirs", "closed", "unknown"]


def token_file() -> Path | None:
    """Return the file that holds the token, whether or not it exists; None if the environment has the token."""
    if os.environ.get("RAY_AUTH_TOKEN"):
        return None
    named = os.environ.get("RAY_AUTH_TOKEN_PATH")
    try:
        return Path(named) if named else Path.home() / ".ray" / "auth_token"
    except RuntimeError:  # neither HOME nor the system says where this user's home is
        return Path("/.ray/auth_token")


def token() -> str:
    """Return the token; empty if there is none or it cannot be read."""
    given, file = os.environ.get("RAY_AUTH_TOKEN", ""), token_file()
    if file is None:
        return given.strip()
    try:
        return file.read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def guard_of(address: str, *, shows_token: bool = True, timeout_s: float = 5.0) -> Guard:  # limit: for the answer
    """Return what the Ray at `host:port` asks for. `shows_token`: whether it may be shown our token."""
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
    """Whether the environment turns Ray's authentication off."""
    return os.environ.get("RAY_AUTH_MODE", "").lower() == "disabled"


def make_token() -> None:
    """Write a new token into the file where Ray looks for it, if there is none. Ray's own file would be readable by
    everybody.

    Raises:
        EnvironmentFaultError: it cannot be written.
    """
    file = token_file()
    if file is None or is_refused():
        return
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if file.exists():
            return
        new = file.with_name(f"{file.name}.{os.getpid()}")
        write_whole(new, secrets.token_hex(_TOKEN_BYTES), mode=0o600)
        with contextlib.suppress(FileExistsError):  # unlike a rename, a link leaves the token that another process made
            os.link(new, file)
        new.unlink()
    except OSError as error:
        raise EnvironmentFaultError(
            f"Ray's token {file} cannot be written ({error.strerror}). Set HOME to a folder that this user can write, "
            "or RAY_AUTH_TOKEN to 64 random characters."
        ) from error


def readable_by_others(file: Path) -> bool:
    """Whether other users of this machine can read a file."""
    return bool(file.stat().st_mode & 0o044)
