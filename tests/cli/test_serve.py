"""`tenuto serve` as a user runs it: a process of its own, operated from another terminal, stopped by a signal."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path

import httpx
import pytest

from tenuto.cli import main
from tenuto.deployments.serve.endpoint import get_json
from tenuto.deployments.serve.launcher import unused_port
from tenuto.errors import EnvironmentFaultError
from tests.instruments.forking import ROOT
from tests.instruments.live import PATIENCE_S, until, with_mark

# Its replicas are forked, as those of every Ray in these tests.
WHOLE = """
import sys
from tenuto.cli import main
from tests.instruments.forking import forked_ray_workers

with forked_ray_workers():
    main(sys.argv[1:])
"""
PROGRAM = WHOLE.replace("forked_ray_workers()", "forked_ray_workers(is_whole=False)")

# It kills a process of its Ray before the n-th call that may block.
DIES = (
    """
import os, signal, sys, threading
from types import SimpleNamespace
from tenuto.deployments.process import limits
from tests.cli.test_serve import below

victim, number = sys.argv.pop(1), int(sys.argv.pop(1))
calls = []

def thread(**how):
    calls.append(how)
    if len(calls) == number:
        os.kill(below(os.getpid(), victim)[0], signal.SIGKILL)
    return threading.Thread(**how)

limits.threading = SimpleNamespace(Thread=thread)
"""
    + PROGRAM
)

PLAN = """
schema: 1
policy: {name: test}
gpus: [{id: n0/0, type: v100}]
gpulets:
- {id: n0/0/a, gpu: n0/0, models: [{name: m, batch_size: 2, latency_ms: 12, latency: {alpha_ms: 1, beta_ms: 10}}]}
models:
- {name: m, rate_rps: 10, slo_ms: 100, latency: {alpha_ms: 1, beta_ms: 10}}
"""


# The same with a model that writes a token each 30 ms.
WRITES = (
    PLAN.replace("{id: n0/0, type: v100}", "{id: n0/0, type: v100}, {id: n0/1, type: v100}").replace(
        "models:\n",
        """- id: n0/1/a
  gpu: n0/1
  models: [{name: w, batch_size: 8, kv_tokens: 4096, steps: {prefill_ms: [[0, 30]], decode_ms: [[0, 30]]}}]
models:
""",
    )
    + """
- name: w
  rate_rps: 1
  slo: {ttft_ms: 60000, tpot_ms: 10000}
  generates: {prompt_tokens: 5, output_tokens: 5, max_sequences: 8, max_batch_tokens: 64}
  options: {tokenizer: bytes}
"""
)


def tenuto(*args: str, program: str = PROGRAM, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", program, *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={key: value for key, value in {**os.environ, **environment}.items() if value},
    )


def is_ready(url: str) -> bool:
    try:
        return bool(get_json(f"{url}/v2/health/ready", 1.0).get("ready"))
    except EnvironmentFaultError:
        return False


@pytest.mark.ray
def test_sigterm_drains_exits_0_and_leaves_nothing_running(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Ctrl-C goes the same way; Ray has a handler of its own for SIGTERM alone."""
    plan = tmp_path / "plan.yaml"
    plan.write_text(WRITES)
    mark, port = uuid.uuid4().hex, unused_port()
    ray_folder = tempfile.mkdtemp(prefix="r")  # short enough for sockets
    # As a user has it, who never heard of Ray's token.
    alone = {"RAY_TMPDIR": ray_folder, "RAY_AUTH_MODE": "", "TENUTO_TEST_MARK": mark}
    address = {"RAY_ADDRESS": "local", **alone}
    process = tenuto("serve", str(plan), "--port", str(port), "--emulate", program=WHOLE, **address)
    url = f"http://127.0.0.1:{port}"
    try:
        until(lambda: process.poll() is not None or is_ready(url))
        assert process.poll() is None, process.communicate()
        with pytest.raises(SystemExit) as shown_status:
            main(["status", "--url", url])
        assert shown_status.value.code == 0
        assert "emulated v100" in capsys.readouterr().out
        plan.write_text(WRITES.replace("batch_size: 2", "batch_size: 4"))
        process.send_signal(signal.SIGHUP)
        said = [""]
        while f"{plan} is served" not in said[-1]:  # each look at the history is a process that connects to Ray
            assert process.stderr is not None
            said.append(process.stderr.readline())
            assert said[-1], said  # it has ended
            assert "nothing was reloaded" not in said[-1]
        assert get_json(f"{url}/status")["gpulets"][0]["models"] == {"m": 4}
        asked = {"model": "w", "prompt": "x", "max_tokens": 100, "stream": True}
        written = httpx.stream("POST", f"{url}/v1/completions", json=asked, timeout=PATIENCE_S)

        told: list[str] = []

        def is_recorded() -> bool:
            asked = tenuto("history", **alone)
            shown, err = asked.communicate(timeout=PATIENCE_S)
            assert asked.returncode == 0, err
            told.append(str(shown))
            return "reload" in told[-1]

        until(is_recorded)  # what is done is recorded after it
        assert "serve" in told[-1]
        with written as answer:
            lines = answer.iter_lines()
            assert "choices" in next(lines)
            process.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line]
        assert (len(rest), rest[-1]) == (101, "data: [DONE]")
        out, err = process.communicate(timeout=PATIENCE_S)
    finally:
        if process.poll() is None:
            process.kill()
    assert process.returncode == 0, err
    assert "Traceback" not in "".join([*said, err])
    assert "draining" in err
    assert out == ""
    shutil.rmtree(ray_folder, ignore_errors=True)
    until(lambda: with_mark(mark) == [])


def serving(tmp_path: Path, *first: str, program: str = PROGRAM) -> tuple[subprocess.Popen[str], str, str]:
    """Start the server on a Ray of its own; return its process, its address and the mark of its processes. `first`:
    arguments of another program than the usual one."""
    plan, mark, port = tmp_path / "plan.yaml", uuid.uuid4().hex, unused_port()
    plan.write_text(PLAN)
    alone = {"RAY_TMPDIR": tempfile.mkdtemp(prefix="r"), "RAY_AUTH_MODE": "", "TENUTO_TEST_MARK": mark}
    arguments = (*first, "serve", str(plan), "--port", str(port), "--emulate")
    process = tenuto(*arguments, program=program, RAY_ADDRESS="local", **alone)
    return process, f"http://127.0.0.1:{port}", mark


def of_ray(process: subprocess.Popen[str], part: str) -> list[int]:
    """Return its processes of Ray, by a part of their command lines."""
    return below(process.pid, part)


def below(pid: int, part: str) -> list[int]:
    """Return the processes below one whose command line begins with words that hold `part`. Ray's agents write their
    title over their environment."""
    found, waiting = [], [pid]
    while waiting:
        pid = waiting.pop()
        try:
            for thread in Path(f"/proc/{pid}/task").iterdir():
                waiting += [int(child) for child in (thread / "children").read_text().split()]
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[:3]
        except OSError:
            continue
        if part.encode() in b" ".join(words):
            found.append(pid)
    return found


@pytest.mark.ray
def test_the_death_of_rays_agent_is_said_and_ends_it_with_3(tmp_path: Path) -> None:
    """Ray's raylet ends with its agent, and all that serves with that; it hung for ever."""
    process, url, mark = serving(tmp_path)
    try:
        until(lambda: process.poll() is not None or is_ready(url))
        assert process.stderr is not None
        (agent,) = of_ray(process, "DashboardAgent")
        os.kill(agent, signal.SIGSTOP)  # on a busy machine it takes a while until the foreground knows the agent
        err = ""
        while "dashboard agent (pid" not in err:
            err += (line := process.stderr.readline())
            assert line, err
        os.kill(agent, signal.SIGKILL)
        err += process.communicate(timeout=PATIENCE_S)[1]  # nothing that was written before is still unread
    finally:
        process.kill()
    assert process.returncode == 3, err
    assert "agent died: Ray's raylet ends with it\n" in err, err
    assert "raylet died: nothing can serve without it: ending all. Run the command again" in err, err
    assert with_mark(mark) == []


_NIGHT = pytest.mark.night


@pytest.mark.ray
@pytest.mark.parametrize(
    ("victim", "call", "said"),
    [
        ("/raylet/raylet", 12, "raylet died"),  # Serve starts
        *(pytest.param("/raylet/raylet", call, "raylet died", marks=_NIGHT) for call in (1, 7, 10, 14, 17, 30)),
        *(pytest.param("gcs_server", call, "Ray's head (GCS) died", marks=_NIGHT) for call in (1, 7, 12, 30)),
        *(pytest.param("DashboardAgent", call, "dashboard agent died", marks=_NIGHT) for call in (12, 17, 30)),
    ],
)
def test_what_of_ray_dies_while_it_starts_is_named(tmp_path: Path, victim: str, call: int, said: str) -> None:
    process, _, mark = serving(tmp_path, victim, str(call), program=DIES)
    try:
        _, err = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
    assert process.returncode == 3, err
    assert said in err, err
    assert "internal error" not in err
    assert "Run the command again" in err
    assert with_mark(mark) == []


def test_a_fault_of_ray_is_no_internal_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from ray.exceptions import ActorDiedError

    def fails(*_: object, **__: object) -> None:
        raise ActorDiedError

    monkeypatch.setattr("tenuto.cli.root.main", fails)
    code, err = refused(capsys)
    assert code == 3
    assert err.startswith("error: Ray or a process of it ended or does not answer (ActorDiedError: ")
    assert "Run `tenuto doctor`" in err


@pytest.mark.ray
def test_sigterm_during_the_start_gives_143_and_leaves_nothing(tmp_path: Path) -> None:
    process, _, mark = serving(tmp_path)
    try:
        until(lambda: process.poll() is not None or of_ray(process, "/raylet/raylet") != [])
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
    assert process.returncode == 143, err
    assert with_mark(mark) == []


def test_a_chat_template_that_cannot_be_read_is_refused_before_anything_starts(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    model = {"type": "WordLevel", "vocab": {"x": 0}, "unk_token": "x"}
    words = {"version": "1.0", "added_tokens": [], "model": model}
    (tmp_path / "tokenizer.json").write_text(json.dumps(words))
    (tmp_path / "chat_template.jinja").write_text("{% for m in messages %}")
    (tmp_path / "plan.yaml").write_text(WRITES.replace("tokenizer: bytes", f"tokenizer: {tmp_path}"))
    code, told = refused(capsys, "deploy", str(tmp_path / "plan.yaml"), "--emulate")
    assert code == 2
    assert "is no template" in told


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """Return exit code and message of a command that starts nothing."""
    with pytest.raises(SystemExit) as stop:
        main(list(arguments))
    return int(stop.value.code or 0), capsys.readouterr().err


def test_a_plan_of_another_schema_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    plan = tmp_path / "plan.yaml"
    plan.write_text(PLAN.replace("schema: 1", "schema: 7"))
    code, err = refused(capsys, "serve", str(plan))
    assert code == 2
    assert "schema 7 is not supported" in err
    assert "Make the file again with this version" in err


def test_an_unknown_scheduler_is_refused_before_anything_starts(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    plan = tmp_path / "plan.yaml"
    plan.write_text(PLAN)
    code, err = refused(capsys, "serve", str(plan), "--scheduler", "lazy")
    assert code == 2
    assert "deferred" in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--emulate", "--executor", "torch"), "--executor: 'torch': contradicts --emulate. Give one of the two."),
        (("--tls-cert", "cert.pem"), "has one of tls_cert and tls_key. Give both, or neither.\n"),
        (("--tls-cert", __file__, "--tls-key", __file__), "Give PEM files of a certificate and its key"),
        (("--tls-cert", __file__, "--tls-key", "absent"), "Give PEM files of a certificate and its key"),
        (("--host", "0.0.0.0"), "user_config of the gateway: listen.host is 0.0.0.0"),
        (("--port", "7000", "--operator-port", "7000"), "--operator-port: 7000: is the port of --port too. Give "),
        (("--port", "7000", "--operator-port", "7001"), "--operator-port: 7001: is the port of --proxy-port too. "),
        (("--proxy-port", "8000", "--host", "localhost"), "--proxy-port: 8000: is the port of --port too. "),
        (("--grpc-port", "8000"), "--grpc-port: 8000: is the port of --port too. "),
    ],
)
def test_what_does_not_go_together_is_refused_before_anything_starts(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments: tuple[str, ...], words: str
) -> None:
    plan = tmp_path / "plan.yaml"
    plan.write_text(PLAN)
    code, err = refused(capsys, "serve", str(plan), *arguments)
    assert code == 2
    assert words in err


def test_an_address_that_is_none_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    for options in ((), ("--watch",)):
        code, err = refused(capsys, "status", *options, "--url", "nonsense")
        assert (code, "Give a URL, or host:port of its Ray." in err) == (2, True)


def test_status_without_a_server_says_how_to_start_one(capsys: pytest.CaptureFixture[str]) -> None:
    code, err = refused(capsys, "status", "--url", "http://127.0.0.1:9")
    assert code == 3
    assert "tenuto serve PLAN" in err
