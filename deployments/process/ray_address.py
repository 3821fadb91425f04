"""Joining a Ray cluster: whether a Ray answers at an address, how to join a Ray that listens only on the loopback
interface, and where commands find the address of a Ray that was started here.

The address is tried before Ray tries it, as `ray.init` takes 80 s to give up on a wrong address and then ends the
process. A Ray that is joined is shown the token, so addresses must be trusted. Ray notes its last cluster in
`/tmp/ray`, which it opens to every user of the machine; this note is never read here. An address comes from the user,
or from a folder that only we can write.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import stat
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tenuto.deployments.process.limits import within
from tenuto.deployments.process.ray_token import guard_of, token_file
from tenuto.documents import write_whole
from tenuto.errors import EnvironmentFaultError, InvalidInputError
from tenuto.files import parse_json, read_text

_QUIET: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR, "namespace": "tenuto"}

# Ray's own switch for "this machine only", named after the systems where that is the default. With it, Ray's head,
# agents and workers listen on the loopback interface and not on the machine's own address.
_ONE_MACHINE = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"

# The beginning of any HTTP/2 connection (RFC 9113 §3.4): the preface and an empty SETTINGS frame. The server answers
# with a SETTINGS frame. Ray speaks gRPC, which is HTTP/2.
_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
_SETTINGS = 4  # format: the type of that frame
_LISTENS = "0A"  # the state of a listening socket in /proc/net/tcp, see proc(5)
# The address of a Unix socket holds 107 bytes (unix(7)). Below the folder Ray 2.60 makes a session, named by time and
# process, and sockets in it: /session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store
_LONGEST_FOLDER = 107 - 64  # limit: the rest of the 107 bytes
_NOTES = "[0-9]*"  # files of deployments, named by port; not those that are being written
_LOOPBACK = ("127.0.0.1", "localhost", "::1", "[::1]")


def why_unreachable(address: str, timeout_s: float = 5.0) -> str | None:  # limit: for the answer
    """Return why no Ray cluster can be at an address; None when one may be, or when the address is Ray's to resolve.

    Args:
        address: `host:port`, `ray://host:port`, or `auto`: the address in RAY_ADDRESS, or the Ray that we started here.
        timeout_s: limit for the connection, and again for the first answer.
    """
    address = _resolved(address)
    host, port = address.removeprefix("ray://").rpartition(":")[0], _port_of(address)
    if not host or not 0 < port < 65_536:  # format: ports of TCP
        return None if address in ("", "auto", "local") else f"'{address}' is not host:port"
    return _why_not_ray(host.strip("[]"), port, timeout_s)


def join_ray(address: str = "auto") -> None:
    """Join a running cluster, also one that listens only on this machine's loopback interface.

    Raises:
        ConnectionError: no cluster answers there; the message says why.
    """
    reason = why_unreachable(address)
    if reason is not None:
        raise ConnectionError(reason)
    address = _resolved(address)
    if not address:
        raise ConnectionError("no deployment of yours runs here. Give the address of another: --address, RAY_ADDRESS")
    _refuse_unguarded(address)
    if _is_of_this_machine(address):
        _use_token()
    with on_loopback() if _is_on_loopback_alone(address) else contextlib.nullcontext():
        try:
            begin_ray(address=address)
        except (RuntimeError, ValueError, SystemExit) as error:  # another version; it exits if the cluster is not Ray's
            raise ConnectionError(str(error)) from error


def begin_ray(**how: Any) -> None:
    """Call `ray.init`, which no call of Ray's does by itself from then on.

    Ray's calls do so when no Ray is joined, also in threads of Serve that outlive `end_ray`. They would start a Ray, or
    join the one in Ray's note and show it our token.
    """
    import ray
    from ray._private import auto_init_hook
    from ray.job_config import JobConfig

    auto_init_hook.enable_auto_connect = False
    # Ray 2.60 puts this process's working folder and its program's folder before all that workers import, unless the
    # job brings a folder of its own. A `numpy.py` there would run in every worker.
    job = JobConfig()
    job._runtime_env_has_working_dir = lambda: True
    ray.init(**how, **_QUIET, job_config=job)


def end_ray(limit_s: float) -> None:
    """Call `ray.shutdown`, which may take so long. Threads of Serve's handles do not end with it, and would tell of it
    in the log."""
    import ray

    logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    within(limit_s, ray.shutdown)


def _refuse_unguarded(address: str) -> None:
    """Raise `ConnectionError` if the cluster asks for a token that we cannot show; Ray itself would try for 20 s."""
    if address.startswith("ray://"):
        return
    guard = guard_of(address, shows_token=may_show_token(address))
    if guard == "closed":
        raise ConnectionError(
            f"the Ray at {address} asks for a token, which is not shown to another machine unasked. Set "
            "RAY_AUTH_MODE=token"
        )
    if guard == "theirs":
        held = "the one of RAY_AUTH_TOKEN" if token_file() is None else f"in {token_file()}"
        raise ConnectionError(
            f"the Ray at {address} asks for a token, and it is not {held}. Copy ~/.ray/auth_token of whoever started "
            "it there (chmod 600), or set RAY_AUTH_TOKEN"
        )


def may_show_token(address: str) -> bool:
    """Whether Ray's token may be shown to the cluster at an address: it is on this machine, or RAY_AUTH_MODE says
    so."""
    return _is_of_this_machine(address) or os.environ.get("RAY_AUTH_MODE", "").lower() == "token"


@contextlib.contextmanager
def on_loopback() -> Iterator[None]:
    """Let a Ray that is started or joined in this block use the loopback interface. Its processes inherit this."""
    from ray._private import ray_constants

    before, was_set = ray_constants.ENABLE_RAY_CLUSTER, os.environ.get(_ONE_MACHINE)
    ray_constants.ENABLE_RAY_CLUSTER = False  # read from the environment when Ray was imported, which may be long ago
    os.environ[_ONE_MACHINE] = "0"
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before
        if was_set is None:
            del os.environ[_ONE_MACHINE]
        else:
            os.environ[_ONE_MACHINE] = was_set


def _is_of_this_machine(address: str) -> bool:
    import ray

    host = address.removeprefix("ray://").rpartition(":")[0]
    return host in _LOOPBACK or host == ray.util.get_node_ip_address()


def _use_token() -> None:
    """Let Ray show its token to a cluster of this machine, if there is one and the environment does not forbid it.

    Ray 2.60 does this by itself only for the address `auto`, but we give it a real address. Ray's warning is silenced.
    """
    from ray._private.authentication import authentication_token_setup as setup

    before = setup.logger.level
    setup.logger.setLevel(logging.ERROR)
    try:
        setup.maybe_enable_token_auth_if_token_available(warn_if_disabled=False)
    finally:
        setup.logger.setLevel(before)


def cluster_address() -> str:
    """Return the address of the Ray that this process is connected to; empty without one."""
    ray = sys.modules.get("ray")
    return str(ray.get_runtime_context().gcs_address) if ray is not None and ray.is_initialized() else ""


def own_address_for(node_id: str) -> str:
    """Return the address by which processes on a Ray node reach this one; empty for processes on the same node."""
    if not node_id:
        return ""
    import ray

    return "" if node_id == ray.get_runtime_context().get_node_id() else str(ray.util.get_node_ip_address())


def _is_on_loopback_alone(address: str) -> bool:
    """Whether the cluster listens only on loopback, so that Ray would look for it in vain at the machine's address."""
    import ray

    host, _, port = address.rpartition(":")
    own = ray.util.get_node_ip_address()
    return host in _LOOPBACK and own not in _LOOPBACK and _why_not_ray(own, int(port), 1.0) is not None


def _why_not_ray(host: str, port: int, timeout_s: float) -> str | None:
    shown = f"{host}:{port}"
    try:
        with socket.create_connection((host, port), timeout=timeout_s) as connection:
            if os.environ.get("RAY_USE_TLS", "0") not in ("", "0"):
                return None  # the server waits for TLS first
            connection.sendall(_HELLO)
            answer = connection.recv(9)
    except TimeoutError:
        return f"{shown} does not answer within {timeout_s:g} s"
    except (OSError, OverflowError) as error:
        return f"{shown}: {getattr(error, 'strerror', None) or error}"
    if len(answer) < 4 or answer[3] != _SETTINGS:
        return f"something else than Ray listens at {shown}"
    return None


def running_ray() -> str:
    """Return the address of the Ray that commands join by default; empty if none answers.

    Raises:
        EnvironmentFaultError: there are several.
    """
    address = _resolved("auto")
    return address if address and why_unreachable(address, 1.0) is None else ""


@dataclass(frozen=True)
class KnownDeployment:
    """A deployment that this user brought up on this machine: the address of its Ray, its name, and the URLs for
    clients and operators. While it starts, all but the first are empty."""

    address: str
    name: str = ""
    url: str = ""
    operator_url: str = ""

    def __str__(self) -> str:
        return f"{self.name or 'without a name'} (on the Ray at {self.address})"


def known_deployments() -> list[KnownDeployment]:
    """Return the deployments that this user brought up on this machine and whose Ray runs, in order.

    The port of an ended deployment may belong to another user now. So a deployment counts only while a socket of this
    user listens there.
    """
    deployments = []
    try:
        files = sorted(_notes().glob(_NOTES)) if _is_ours_alone(_own_folder()) else []
    except OSError:
        return []
    for file in files:
        with contextlib.suppress(OSError, InvalidInputError, TypeError):  # another version wrote it
            deployments.append(KnownDeployment(**parse_json(read_text(file), str(file))))
    return [k for k in deployments if _is_listened_to_by_us(k.address) and why_unreachable(k.address, 1.0) is None]


def _is_listened_to_by_us(address: str) -> bool:
    return _listeners(_port_of(address)) == {os.geteuid()}


def _port_of(address: str) -> int:
    """Return the port at the end of an address; 0 if there is none."""
    port = address.rpartition(":")[2]
    return int(port) if port.isdecimal() and len(port) <= 5 else 0  # format: ports of TCP


def _resolved(address: str) -> str:
    """Return the address that `auto` means: RAY_ADDRESS, or the Ray of the deployment here; empty if there is none.

    Raises:
        EnvironmentFaultError: there are several.
    """
    if address != "auto":
        return address
    named = running_address()
    known = [] if named else known_deployments()
    if len(known) > 1:
        raise EnvironmentFaultError(
            f"several deployments run here: {', '.join(map(str, known))}. Name one with --address."
        )
    return named or (known[0].address if known else "")


def running_address(address: str | None = None) -> str | None:
    """Return the address of a running Ray, as it is given or else as RAY_ADDRESS has it; None if none is named. `local`
    names none: it asks for a new Ray, on which nothing is deployed."""
    address = address or os.environ.get("RAY_ADDRESS")
    return None if address == "local" else address or None


def make_session_folder() -> Path:
    """Make and return the folder for the sessions of a Ray that is started here.

    Ray lets every user of the machine write into its sessions, so they lie in a folder that only this user can enter.
    RAY_TMPDIR says where (default: /tmp).

    Raises:
        EnvironmentFaultError: the folder cannot be made, is open to others, or its path is too long for Ray's sockets.
    """
    folder = _own_folder()
    cure = "Set RAY_TMPDIR to a folder of your own with a short path."
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise EnvironmentFaultError(f"{folder} for Ray's sessions cannot be made ({error.strerror}). {cure}") from error
    if not _is_ours_alone(folder):
        raise EnvironmentFaultError(
            f"{folder} for Ray's sessions must be a folder that only this user can enter (mode 700): remove it. {cure}"
        )
    sessions = folder / "ray"
    if not str(sessions).isascii():
        raise EnvironmentFaultError(f"{sessions} for Ray's sessions has letters that Ray does not take. {cure}")
    if len(os.fsencode(sessions)) > _LONGEST_FOLDER:
        raise EnvironmentFaultError(f"{sessions} has too long a path for Ray's sockets. {cure}")
    return sessions


def announce(known: KnownDeployment) -> None:
    """Let other commands of this user find a deployment that was just brought up here. For a Ray on another machine
    this does nothing."""
    if not _is_of_this_machine(known.address):
        return
    make_session_folder()
    _notes().mkdir(parents=True, exist_ok=True)
    for file in _notes().glob(_NOTES):
        if not _is_listened_to_by_us(file.name):
            file.unlink(missing_ok=True)  # that deployment is gone
    write_whole(_notes() / known.address.rpartition(":")[2], json.dumps(asdict(known)))
    # Ray's own commands look there when RAY_TMPDIR is our folder.
    write_whole(_notes().with_name("ray_current_cluster"), known.address)


def _own_folder() -> Path:
    return Path(os.environ.get("RAY_TMPDIR") or "/tmp").absolute() / f"tenuto-{os.geteuid()}"


def _is_ours_alone(folder: Path) -> bool:
    status = folder.lstat()
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077


def _notes() -> Path:
    """Return the folder that has a file for every Ray started here, named by its port."""
    return _own_folder() / "ray" / "started"


def _listeners(port: int) -> set[int]:
    """Return the users whose TCP sockets listen on a port of this machine, on any address."""
    users = set()
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):  # without IPv6 there is no second table
            for line in Path("/proc/net", table).read_text(encoding="ascii").splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTENS and int(fields[1].rpartition(":")[2], 16) == port:
                    users.add(int(fields[7]))
    return users
