"""Ray's token is shown to nobody who only wrote an address where Ray looks for one."""

import os
import re
import socket
import stat
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import click
import grpc
import pytest
import ray

from tenuto.cli import VERBS, main, root
from tenuto.deployments.process.ray_address import KnownDeployment, announce, make_session_folder, running_ray
from tenuto.deployments.serve.deployment import Deployment
from tenuto.documents import dump_yaml
from tenuto.errors import EnvironmentFaultError
from tests.instruments.plans import make_plan

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what Ray Serve imports

SECRET = os.environ["RAY_AUTH_TOKEN"]  # of this test run: Ray keeps the first that it reads in a process
ROOT = Path(__file__).parents[3]


class Thief(grpc.GenericRpcHandler):
    """Something that listens as Ray's head does, refuses who shows no token, and keeps all that it is shown."""

    def __init__(self) -> None:
        self.shown: list[tuple[str, str]] = []

    def service(self, details: Any) -> Any:
        self.shown += [(name, str(value)) for name, value in details.invocation_metadata]
        given = dict(details.invocation_metadata).get("authorization")

        def answer(_request: bytes, context: grpc.ServicerContext) -> bytes:
            if given is None:
                context.abort(grpc.StatusCode.UNAUTHENTICATED, "InvalidAuthToken")
            return b""

        return grpc.unary_unary_rpc_method_handler(answer)

    def has_the_token(self) -> bool:
        return any(SECRET in value for _, value in self.shown)


@pytest.fixture
def thief(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Thief, str]]:
    """A listener whose address stands where Ray notes its last cluster, and a user with a token who knows nothing."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(ray, "init", _refuse_to_join)
    found = Thief()
    server = grpc.server(ThreadPoolExecutor(1), handlers=[found])
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "ray_current_cluster").write_text(address)
    yield found, address
    server.stop(None).wait()


def _refuse_to_join(*_arguments: object, **_options: object) -> None:
    raise RuntimeError("no Ray in this test")


def joining() -> Iterator[list[str]]:
    """Every command that has an option for a Ray cluster, and the one that looks for Ray without."""
    yield ["doctor"]
    for verb in VERBS:
        command = root.get_command(click.Context(root), verb)
        assert command is not None
        found = dict(command.commands) if isinstance(command, click.Group) else {"": command}
        for name, each in found.items():
            if any(option.name == "address" for option in each.params):
                yield [verb, *([name] if name else [])]


OF_ENDPOINTS = ("status", "bench")  # without an address they go to http://127.0.0.1:8000
ARGUMENTS = {
    "bench": ["PLAN"],
    "serve": ["PLAN"],
    "deploy": ["PLAN"],
    "diff": ["PLAN"],
    "cluster": ["--address", "auto"],
    "model add": ["{name: resnet50, rate_rps: 1, slo_ms: 50}"],
    "model update": ["{name: resnet50, rate_rps: 1, slo_ms: 50}"],
    "model remove": ["resnet50"],
    "model canary": ["resnet50", "2", "--share", "5"],
    "model promote": ["resnet50", "2"],
    "model take-back": ["resnet50", "2"],
    "drain": ["n1"],
    "undrain": ["n1"],
}


@pytest.mark.parametrize("command", list(joining()), ids=" ".join)
def test_no_command_shows_the_token_to_an_address_that_others_could_write(
    command: list[str], thief: tuple[Thief, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, address = thief
    plan = tmp_path / "plan.yaml"
    plan.write_text(
        dump_yaml(Deployment(plan=make_plan({"n0/0/a": (100.0, ["m"])}), executor="emulated").config().to_data())
    )
    arguments = [str(plan) if each == "PLAN" else each for each in ARGUMENTS.get(" ".join(command), [])]
    with pytest.raises(SystemExit):
        main([*command, *arguments])
    assert found.shown == []
    # The same command shows it to who is given by the user: so the listener sees what there is to see.
    named = ["--address", address] if command[0] in OF_ENDPOINTS else []
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(SystemExit):
        main([*command, *arguments, *named])
    assert found.has_the_token()


def test_one_place_joins_and_starts_rays() -> None:
    """What is not there cannot be tested above: other code that talks to Ray would need the same care."""
    places = {
        path.relative_to(ROOT).as_posix()
        for folder in ("profiles", "mps", "placement", "batching", "deployments", "loadgen", "tenuto")
        for path in (ROOT / folder).rglob("*.py")
        if not any(each.is_symlink() for each in path.parents)
        if re.search(r"\bray\.init\(|ray_current_cluster\"|read_ray_address|find_bootstrap", path.read_text())
    }
    assert places == {"deployments/process/ray_address.py"}


@pytest.fixture
def short() -> Iterator[str]:
    """A folder with a path short enough for Ray's sockets; pytest's own have longer ones."""
    with tempfile.TemporaryDirectory(prefix="r") as folder:
        yield folder


def test_the_folder_of_sessions_is_its_users_alone(tmp_path: Path, short: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_TMPDIR", __file__)
    with pytest.raises(EnvironmentFaultError, match="cannot be made"):
        make_session_folder()
    monkeypatch.setenv("RAY_TMPDIR", short)
    before = os.umask(0)
    try:
        sessions = make_session_folder()
    finally:
        os.umask(before)
    own = sessions.parent
    assert stat.S_IMODE(own.stat().st_mode) == 0o700
    assert make_session_folder() == sessions
    own.chmod(0o770)
    with pytest.raises(EnvironmentFaultError, match="only this user can enter"):
        make_session_folder()
    own.rmdir()
    own.symlink_to(tmp_path)
    with pytest.raises(EnvironmentFaultError, match="only this user can enter"):
        make_session_folder()
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path / ("long" * 20)))
    (tmp_path / ("long" * 20)).mkdir()
    with pytest.raises(EnvironmentFaultError, match="too long a path"):
        make_session_folder()


def test_an_address_counts_while_a_socket_of_ours_listens_there(short: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_TMPDIR", short)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("tenuto.deployments.process.ray_address.why_unreachable", lambda *_: None)
    make_session_folder().mkdir()
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        port = listener.getsockname()[1]
        announce(KnownDeployment(f"127.0.0.1:{port}"))
        assert running_ray() == f"127.0.0.1:{port}"
        with closing(socket.create_server(("127.0.0.1", 0))) as second:
            announce(KnownDeployment(f"127.0.0.1:{second.getsockname()[1]}"))
            with pytest.raises(EnvironmentFaultError, match=f"several deployments .*127.0.0.1:{port}.* Name one"):
                running_ray()
            monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{port}")
            assert running_ray() == f"127.0.0.1:{port}"
            monkeypatch.delenv("RAY_ADDRESS")
        assert running_ray() == f"127.0.0.1:{port}"
    assert running_ray() == ""  # gone


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a socket of another user")
def test_a_port_that_another_user_took_over_is_not_ours(short: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_TMPDIR", short)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    make_session_folder().mkdir()
    os.seteuid(65534)
    try:
        listener = socket.create_server(("127.0.0.1", 0))
    finally:
        os.seteuid(0)
    with closing(listener):
        announce(KnownDeployment(f"127.0.0.1:{listener.getsockname()[1]}"))
        assert running_ray() == ""
        listener.setblocking(False)
        with pytest.raises(BlockingIOError):
            listener.accept()  # nobody came
