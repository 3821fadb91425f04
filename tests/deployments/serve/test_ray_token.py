"""The token that Ray's ports are guarded by: made once, for its owner alone, and what `tenuto doctor` says of it."""

import stat
from pathlib import Path

import pytest

from tenuto.deployments.operator.checks import ray_token_check
from tenuto.deployments.serve.ray_token import make_token, token_file


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
    none = ray_token_check()
    assert (none.state, none.cure) == ("note", "ray get-auth-token --generate, before `ray start`")
    make_token()
    assert "export RAY_AUTH_MODE=token before `serve deploy`" in ray_token_check().cure
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    assert ray_token_check().state == "ok"
    (home / ".ray" / "auth_token").chmod(0o644)
    assert (ray_token_check().state, ray_token_check().cure[:9]) == ("fail", "chmod 600")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    assert (ray_token_check().state, ray_token_check().cure) == ("fail", "unset RAY_AUTH_MODE")
