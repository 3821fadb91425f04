"""Commands in environments that others made: proxies, homes, locales and working folders that are not as they should
be. Nothing leaves for a proxy, nothing in the working folder is imported, and no command fails with an internal error.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tenuto.cli import main
from tenuto.cli.deploying import read_deployment
from tenuto.deployments.process.ray_address import make_session_folder
from tenuto.deployments.process.ray_token import make_token, token_file
from tenuto.deployments.serve.endpoint import get_json
from tenuto.errors import EnvironmentFaultError, InvalidInputError
from tenuto.placement import Arrival, ModelSpec, Plan, PolicyUsed
from tests.instruments.fake_server import fake_server
from tests.instruments.live import LONG_MS

ROOT = Path(__file__).parents[2]
FOLDERS = ("tenuto/cli", "batching", "deployments", "loadgen", "mps", "placement", "profiles")
PROXIES = [name for word in ("http", "https", "all") for name in (f"{word}_proxy", f"{word}_proxy".upper())]
WORKLOAD = "models:\n  - {name: resnet50, rate_rps: 300, slo_ms: 200}\n"
SHADOWS = ("json", "numpy", "pickle", "pydantic", "ray", "torch", "yaml", "tenuto")
# Runs commands as the program `tenuto` does, whose own folder comes first where `-P` leaves it out.
_PROGRAM = """
import io, json, sys
from contextlib import redirect_stderr
from tenuto.cli import exit_code, root
ended = []
for words in json.loads(sys.argv[2]):
    with redirect_stderr(io.StringIO()) as said:
        code = exit_code(lambda: root.main(args=words, prog_name="tenuto", standalone_mode=False))
    ended.append((words, code, said.getvalue()))
with open(sys.argv[1], "w", encoding="utf-8") as file:
    json.dump(ended, file)
"""


def test_every_variable_of_tenutos_own_is_documented() -> None:
    page = (ROOT / "docs" / "reference" / "environment.md").read_text()
    sources = [(ROOT / folder).rglob("*.py") for folder in FOLDERS]
    read = {name for files in sources for file in files for name in re.findall(r'"(TENUTO_[A-Z_]+)"', file.read_text())}
    assert len(read) > 5
    assert sorted(name for name in read if f"`{name}`" not in page) == []


class Proxy:
    """Listens as a company's proxy would, and answers nobody."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._socket.setblocking(False)
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"

    def was_asked(self) -> bool:
        """Whether anybody has connected."""
        try:
            self._socket.accept()[0].close()
        except BlockingIOError:
            return False
        return True

    def close(self) -> None:
        """Listen no more."""
        self._socket.close()


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """A proxy that every variable names."""
    with closing(Proxy()) as listening:
        for name in PROXIES:
            monkeypatch.setenv(name, listening.url)
        for name in ("no_proxy", "NO_PROXY"):
            monkeypatch.delenv(name, raising=False)
        yield listening


def run(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main([*words])
    return int(ended.value.code or 0)


def unused_url() -> str:
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        return f"http://127.0.0.1:{taken.getsockname()[1]}"


def test_no_proxy_sees_what_a_server_is_asked(
    proxy: Proxy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TENUTO_API_KEY", "secret")
    uniform = Arrival(process="uniform")
    plan = Plan(
        policy=PolicyUsed(name="test"), models=(ModelSpec(name="m", rate_rps=100, slo_ms=LONG_MS, arrival=uniform),)
    )
    file = tmp_path / "plan.yaml"
    file.write_text(plan.dump())
    with fake_server(plan=plan.to_data()) as server:
        for target in ((str(file), "--url", server.url), (server.url,)):
            assert run("bench", *target, "--duration-s", "0.3", "--warmup-s", "0", "--clients", "0") == 0
    assert run("status", "--address", unused_url()) == 3
    assert f"asked directly, and not through the proxy {proxy.url}." in capsys.readouterr().err
    assert not proxy.was_asked()


@pytest.mark.parametrize("key", ["sécret", "se\ncret"])
def test_a_key_that_no_header_may_have_is_said_to_be_one(monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    monkeypatch.setenv("TENUTO_API_KEY", key)
    with pytest.raises(InvalidInputError, match=r"TENUTO_API_KEY: has characters that no key has") as refusal:
        get_json(unused_url())
    assert "cret" not in str(refusal.value)


def test_commands_work_in_an_environment_of_others(tmp_path: Path) -> None:
    folder, written = tmp_path / "mein Ordner ü", tmp_path / "ended.json"
    folder.mkdir()
    (folder / "w.yaml").write_text(WORKLOAD)
    for name in SHADOWS:
        (folder / f"{name}.py").write_text(f"raise SystemExit('{name} of the working folder was imported')\n")
    plan, gpus = "my plän.yaml", ("--gpus", "v100:2")
    commands: list[tuple[tuple[str, ...], int]] = [
        (("plan", "w.yaml", *gpus, "--policy", "ffd", "-o", plan), 0),
        (("plan", "w.yaml", *gpus, "--compare", "gpulet,ffd"), 0),  # prints ×
        (("simulate", plan, "--duration-s", "1"), 0),
        (("explain", plan), 0),
        (("policies",), 0),
        (("key", "app"), 0),
        (("status", "--address", unused_url()), 3),
        (("status", "--address", "my plän"), 2),
        (("bench", plan, "--address", unused_url(), "--clients", "0"), 3),
        (("plan", "nö.yaml", *gpus), 2),
    ]
    with closing(Proxy()) as proxy:
        hostile = {
            **os.environ,
            **dict.fromkeys(PROXIES, proxy.url),
            "PYTHONIOENCODING": "ascii",
            "TMPDIR": str(folder),
            "RAY_TMPDIR": str(folder),
            **dict.fromkeys(
                ("HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "HF_HOME"), "/proc"
            ),  # nobody may write there
            "USER": "",
            "LANG": "C",
            "TERM": "",
            "COLUMNS": "abc",
            "TZ": "Nowhere/Nowhere",
            "OMP_NUM_THREADS": "many",
            "CUDA_VISIBLE_DEVICES": "none of them",
        }
        for name in ("RAY_ADDRESS", "TENUTO_API_KEY", "TENUTO_DEBUG", "PYTHONPATH", "no_proxy", "NO_PROXY"):
            hostile.pop(name, None)
        asked = json.dumps([words for words, _ in commands])
        program = [sys.executable, "-P", "-c", _PROGRAM, str(written), asked]
        subprocess.run(program, cwd=folder, env=hostile, stdout=subprocess.DEVNULL, check=True)
        assert not proxy.was_asked()
    ended = json.loads(written.read_text(encoding="utf-8"))
    assert [(tuple(words), code) for words, code, _ in ended] == commands, ended
    assert [said for _, _, said in ended if "internal error" in said] == []


@pytest.mark.parametrize(
    ("file", "name"),
    [("my plan.yaml", "my-plan"), ("plän.yaml", "plän"), ("a/b:c?.yaml", "b-c-"), (f"{'x' * 80}.yaml", "x" * 63)],
)
def test_a_deployment_is_named_after_its_file_whatever_that_is_called(tmp_path: Path, file: str, name: str) -> None:
    path = tmp_path / file
    path.parent.mkdir(exist_ok=True)
    path.write_text(Plan(policy=PolicyUsed(name="test")).dump())
    assert read_deployment(str(path)).name == name


def test_a_name_that_is_none_is_refused_with_its_cure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(Plan(policy=PolicyUsed(name="test")).dump())
    assert run("deploy", str(path), "--name", "my plan") == 2
    assert "options: name: 'my plan': " in capsys.readouterr().err


def test_where_a_token_cannot_be_written_the_variables_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/proc")
    with pytest.raises(
        EnvironmentFaultError, match=r"/proc/\.ray/auth_token cannot be written .* Set HOME .* RAY_AUTH"
    ):
        make_token()
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)  # a user whom the machine does not know
    assert token_file() == Path("/.ray/auth_token")


def test_a_folder_that_ray_cannot_use_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path / "ü"))
    with pytest.raises(EnvironmentFaultError, match=r"has letters that Ray does not take\. Set RAY_TMPDIR"):
        make_session_folder()
    with tempfile.TemporaryDirectory(prefix="r") as short:  # for Ray's sockets
        monkeypatch.chdir(short)
        monkeypatch.setenv("RAY_TMPDIR", "r")
        assert make_session_folder().is_absolute()
