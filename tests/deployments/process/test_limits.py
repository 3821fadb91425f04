"""Nothing waits without a limit: the calls that can block for ever, found in the code by their names."""

import ast
import threading
from pathlib import Path

import pytest

from tenuto.deployments.process.limits import within
from tenuto.errors import EnvironmentFaultError

ROOT = Path(__file__).parents[3]
FOLDERS = ("deployments", "tenuto/cli", "mps", "loadgen", "profiles")
FILES = sorted(file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py"))

# Methods and functions that take a limit: in which argument, by place and by name.
LIMITED = {
    "ray.get": (1, "timeout"),
    "ray.wait": (None, "timeout"),
    ".result": (0, "timeout_s"),
    ".wait": (0, "timeout"),
    ".join": (0, "timeout"),
    ".communicate": (None, "timeout"),
    "subprocess.run": (None, "timeout"),
}
# Calls of Ray and Serve that take none: only handed to `within`, or to a thread with it.
UNLIMITED = {
    *(f"ray.{name}" for name in ("init", "nodes", "shutdown", "cluster_resources", "available_resources", "get_actor")),
    *(f"serve.{name}" for name in ("start", "shutdown", "run", "delete", "status", "get_app_handle")),
    *("list_named_actors", "_get_global_client", "list_serve_statuses", "delete_apps", "deploy_apps"),
    "get_serve_details",
    *(f"_internal_kv_{name}" for name in ("get", "put", "list", "del", "exists")),
}
# `ray.init`: Ray's processes end with the thread that starts them, so that it cannot be a short one; `tenuto serve` has
# a process in front that keeps the limit. In `join_ray` it is called through `within`.
ALLOWED = {
    ("deployments/serve/launcher.py", "ray.init"),
    ("deployments/process/ray_address.py", "ray.init"),
    ("deployments/gpulet/mps_sharing.py", ".join"),  # joins a daemon, and waits for no thread
    ("mps/gpu_shares.py", ".join"),
    ("deployments/entry/service/python_handle.py", ".result"),  # of a future of asyncio that is done
    ("deployments/entry/service/inference.py", ".result"),
    ("deployments/entry/service/running_graph.py", ".result"),
    ("mps/daemon.py", "subprocess.run"),  # of a shell that goes into the background at once
}


def _name(call: ast.Call) -> list[str]:
    """Return the names under which a call may stand above: `ray.get`, `.get`, `get`."""
    function = call.func
    if isinstance(function, ast.Name):
        return [function.id]
    if not isinstance(function, ast.Attribute):
        return []
    before = function.value
    owner = before.id if isinstance(before, ast.Name) else before.attr if isinstance(before, ast.Attribute) else ""
    return [f"{owner}.{function.attr}", f".{function.attr}", function.attr]


def _is_text(call: ast.Call) -> bool:
    """Whether this is `", ".join(…)`, `os.path.join` or a network's `join`."""
    return len(call.args) > 0


def unlimited_calls(source: str) -> list[tuple[int, str]]:
    """Return the calls of a source text that may wait for ever, by line. Those that a loop awaits are left out: they
    stop nothing but their own task."""
    tree = ast.parse(source)
    awaits = [node.value for node in ast.walk(tree) if isinstance(node, ast.Await)]
    awaited = {id(value) for value in awaits}
    awaited |= {id(given) for value in awaits if isinstance(value, ast.Call) for given in value.args}  # of `wait_for`
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or id(node) in awaited:
            continue
        for name in _name(node):
            if name in UNLIMITED:
                found.append((node.lineno, name))
            if name in LIMITED and not (name == ".join" and _is_text(node)):
                place, keyword = LIMITED[name]
                is_limited = any(given.arg in (keyword, "timeout", None) for given in node.keywords)
                if not is_limited and (place is None or len(node.args) <= place):
                    found.append((node.lineno, name))
    return found


def test_no_call_waits_without_a_limit() -> None:
    wrong = [
        f"{file.relative_to(ROOT)}:{line}: {name}"
        for file in FILES
        for line, name in unlimited_calls(file.read_text(encoding="utf-8"))
        if (str(file.relative_to(ROOT)), name) not in ALLOWED
    ]
    assert wrong == []


@pytest.mark.parametrize(
    "source",
    [
        "ray.get(answer)",
        "future.result()",
        "self._stop.wait()",
        "thread.join()",
        "process.communicate()",
        "nodes = [node for node in ray.nodes()]",
        "serve.get_app_handle('x').status.remote().result(timeout_s=5)",
        "with_kv = _internal_kv_get(key)",
        "ray.wait(answers, num_returns=3)",
    ],
)
def test_a_call_without_a_limit_is_found(source: str) -> None:
    assert unlimited_calls(source)


@pytest.mark.parametrize(
    "source",
    [
        "ray.get(answer, timeout=3)",
        "future.result(5)",
        "stop.wait(timeout=2)",
        "', '.join(names)",
        "within(3.0, ray.nodes)",
        "within(3.0, serve.get_app_handle, 'x').status.remote().result(timeout_s=5)",
    ],
)
def test_a_call_with_one_is_not(source: str) -> None:
    assert unlimited_calls(source) == []


def test_what_hangs_is_left_behind_and_what_ends_is_handed_on() -> None:
    hung = threading.Event()

    def hang() -> None:
        hung.wait(60.0)

    with pytest.raises(EnvironmentFaultError, match=r"hang has taken more than 0\.05 s"):
        within(0.05, hang)
    hung.set()
    assert within(60.0, divmod, 7, 2) == (3, 1)


def test_the_own_timeout_of_a_call_stays_what_it_is() -> None:
    def give_up() -> None:
        raise TimeoutError("mine")

    with pytest.raises(TimeoutError, match="mine"):
        within(60.0, give_up)
