"""The token that Ray's ports are guarded by: made once, for its owner alone, and what `tenuto doctor` says of it."""

import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
import ray  # noqa: F401  # reads the environment when it is imported, which must not be in a test that changes it

from tenuto.deployments.machines.environment import check_ray_token, check_running_ray
from tenuto.deployments.process.ray_address import join_ray
from tenuto.deployments.process.ray_token import guard_of, make_token, token_file


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home folder without a token, and an environment that says nothing of one."""
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def test_a_token_is_made_once_and_for_its_owner_alone(home: Path) -> None:
    make_token()
    file = token_file()
    assert file == home / ".ray" / "auth_token"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    first = file.read_text()
    assert len(first) == 64
    make_token()
    assert file.read_text() == first


@pytest.mark.parametrize("name", ["RAY_AUTH_TOKEN", "RAY_AUTH_MODE"])
def test_none_is_made_where_the_environment_says_otherwise(
    home: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "disabled")
    make_token()
    assert list(home.iterdir()) == []


def test_the_doctor_says_how_the_token_is_used(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    none = check_ray_token()
    assert (none.state, none.cure) == ("note", "ray get-auth-token --generate, before `ray start`")
    make_token()
    assert "export RAY_AUTH_MODE=token before `serve deploy`" in check_ray_token().cure
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    assert check_ray_token().state == "ok"
    (home / ".ray" / "auth_token").chmod(0o644)
    assert (check_ray_token().state, check_ray_token().cure[:9]) == ("fail", "chmod 600")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    assert (check_ray_token().state, check_ray_token().cure) == ("fail", "unset RAY_AUTH_MODE")


class Head(grpc.GenericRpcHandler):
    """Ray's head as far as its door goes: it takes one token, or, with none, everybody."""

    def __init__(self, token: str | None) -> None:
        self._token = token

    def service(self, details: Any) -> Any:
        given = dict(details.invocation_metadata).get("authorization")

        def answer(_request: bytes, context: grpc.ServicerContext) -> bytes:
            if self._token is not None and given != f"Bearer {self._token}":
                context.abort(grpc.StatusCode.UNAUTHENTICATED, "InvalidAuthToken")
            return b""

        return grpc.unary_unary_rpc_method_handler(answer)


@pytest.fixture
def head(request: pytest.FixtureRequest) -> Iterator[str]:
    server = grpc.server(ThreadPoolExecutor(1), handlers=[Head(request.param)])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None).wait()


@pytest.mark.parametrize("head", ["secret"], indirect=True)
def test_a_ray_with_another_token_is_told_from_ones_own(home: Path, head: str, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = check_running_ray(lambda: head)
    assert (refused.state, refused.found) == ("fail", f"{head} asks for a token that is not in {token_file()}")
    assert refused.cure.startswith("copy ~/.ray/auth_token of whoever started it")
    with pytest.raises(ConnectionError, match=r"asks for a token.* Copy ~/\.ray/auth_token"):
        join_ray(head)
    make_token()
    assert guard_of(head) == "theirs"
    assert guard_of(head, shows_token=False) == "closed"
    (home / ".ray" / "auth_token").write_text("secret\n")
    assert check_running_ray(lambda: head).state == "ok"
    monkeypatch.setenv("RAY_AUTH_TOKEN", "another")
    assert guard_of(head) == "theirs"


@pytest.mark.parametrize("head", [None], indirect=True)
def test_a_ray_that_takes_everybody_fails_the_check(home: Path, head: str) -> None:
    del home
    check = check_running_ray(lambda: head)
    assert (check.state, check.cure[:8]) == ("fail", "ray stop")


def test_what_is_no_ray_says_nothing() -> None:
    assert guard_of("127.0.0.1:9", timeout_s=1.0) == "unknown"
    assert check_running_ray(lambda: "").state == "ok"
