"""Settings that have to be in the environment before Ray starts anywhere in the test session."""

import logging
import os
import secrets
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

from tenuto.profiles.networks.cpu_share import calm_openmp
from tests.instruments.document_diff import explain_difference
from tests.instruments.durations import DURATIONS, DurationRecorder, read_durations
from tests.instruments.forking import keep_collected
from tests.instruments.local_ray import LocalRay

if TYPE_CHECKING:
    from tenuto.deployments.serve.launcher import Launcher
    from tests.instruments.shared_deployment import SharedDeployment

MEASURING = "tenuto.profiles.measuring"
PREPARING = "tenuto.deployments.gpulet.preparing_process"
POOL = "tenuto.deployments.entry.service.process_pool"
CO_RUN = "tenuto_lab.interference.co_run"
# Tests of whole networks. Importing what building, tracing and merging them needs beyond torch takes a process 5 s.
WITH_NETWORKS = (
    "tests/profiles/networks/",
    "lab/tests/estimator/",
    "tests/cli/test_merge",
    "tests/deployments/gpulet/executors/test_torch_executor",
)

# A token of this run alone, as Ray has it on by default, without writing one into the home folder.
os.environ["RAY_AUTH_MODE"] = "token"
os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))  # the workers of pytest-xdist share their parent's
os.environ.pop("RAY_AUTH_TOKEN_PATH", None)
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_worker_niceness", "0")
os.environ.setdefault("RAY_SERVE_CONTROL_LOOP_INTERVAL_S", "0.1")  # Serve's own: every start waits for several turns
os.environ.setdefault("RAY_SERVE_MAX_PER_REPLICA_RETRY_COUNT", "1")  # what cannot start does not start the third time
os.environ.setdefault("RAY_DISABLE_IMPORT_WARNING", "1")
calm_openmp(os.environ)  # several processes with torch on few cores

# Every day's run draws the same few cases, so that a change is what turns it red; `--hypothesis-profile fresh` draws
# many that nobody has seen. How fast a machine draws them is no property of what is tested.
settings.register_profile("fresh", deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=500)
settings.register_profile("everyday", settings.get_profile("fresh"), derandomize=True, max_examples=10)
settings.load_profile("everyday")

# A shell starts what it puts into the background deaf to Ctrl-C, and children inherit that: tests that interrupt a
# process would wait in vain.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Take options of this suite."""
    parser.addoption("--image", action="store_true", help="Build the image too, as root, with buildah and mmdebstrap.")
    parser.addoption("--door", action="store_true", help="Run the deep tests of the bytes at the door too.")
    parser.addoption("--night", action="store_true", help="Run the repetitions that every day's run leaves out too.")
    parser.addoption("--record-durations", action="store_true", help=f"Write into {DURATIONS} how long each file took.")


def pytest_configure(config: pytest.Config) -> None:
    """Write down durations where a whole run is asked to."""
    if config.getoption("--record-durations") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(DurationRecorder())


def pytest_assertrepr_compare(op: str, left: object, right: object) -> list[str] | None:
    """Say how two plans, or other documents, differ."""
    return explain_difference(left, right) if op == "==" else None


@pytest.hookimpl(tryfirst=True)  # xdist reads the groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark as `unit` whatever needs neither Ray nor a GPU, and say which tests stay in one process.

    Those are: all that use one of this run's two Rays; all about networks, so that what builds them is imported once;
    of the others those of one file. So what starts a Ray of its own runs beside those that share one. The group that
    took longest in the recorded run begins first. In a single process tests without Ray come first and what starts a
    Ray of its own comes last, so that the shared one is started once.
    """
    for marker in ("door", "night"):
        if not config.getoption(f"--{marker}"):
            config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker(marker)])
            items[:] = [item for item in items if not item.get_closest_marker(marker)]
    recorded = read_durations()
    rays = _rays(items, recorded)
    for item in items:
        if item.get_closest_marker("image") and not config.getoption("--image"):
            item.add_marker(pytest.mark.skip(reason="takes ten minutes: scripts/test tests/test_image.py --image"))
        if not any(item.get_closest_marker(name) for name in ("ray", "gpu", "image")):
            item.add_marker(pytest.mark.unit)
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(_group(item, rays)))
    items.sort(key=_uses_ray)
    if hasattr(config, "workerinput"):
        seconds: Counter[str] = Counter()
        for file, group in {(_file(item), _xdist_group(item)) for item in items}:
            seconds[group] += recorded.get(file, 0.0)
        items.sort(key=lambda item: -seconds[_xdist_group(item)])


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config, specs: list[Any]) -> None:
    """Fork the processes that run tests from one that has collected them."""
    from tests.instruments.forking import forked_test_processes

    forked = ExitStack()
    forked.enter_context(forked_test_processes(config.args, specs))
    config.add_cleanup(forked.close)


def pytest_collection_finish() -> None:
    """Leave modules and tests out of the collector's rounds."""
    keep_collected()


def _uses_ray(item: pytest.Item) -> int:
    """0: not at all; 1 to 3: that of this run, whose shared deployment is asked, then changed, then taken away; 4: one
    of its own."""
    fixtures = getattr(item, "fixturenames", ())
    turns = (("own_ray", 4), ("shared_url", 1), ("shared", 2), ("local_ray", 3))
    return next((turn for name, turn in turns if name in fixtures), 0)


def _file(item: pytest.Item) -> str:
    return item.nodeid.split("::")[0]


def _rays(items: list[pytest.Item], recorded: dict[str, float]) -> dict[str, str]:
    """Return the Ray of each file that uses one of this run's two: the first has the shared deployment; what does not
    ask that goes to the one that has less to do."""
    shares = {_file(item) for item in items if _uses_ray(item) in (1, 2)}
    seconds = {"first Ray": sum(recorded.get(file, 0.0) for file in shares), "second Ray": 0.0}
    groups = dict.fromkeys(shares, "first Ray")
    others = {_file(item) for item in items if _uses_ray(item) == 3} - shares
    for file in sorted(others, key=lambda file: (-recorded.get(file, 0.0), file)):
        groups[file] = min(seconds, key=lambda group: seconds[group])
        seconds[groups[file]] += recorded.get(file, 0.0)
    return groups


def _group(item: pytest.Item, rays: dict[str, str]) -> str:
    if 1 <= _uses_ray(item) <= 3:
        return rays[_file(item)]
    return "networks" if _file(item).startswith(WITH_NETWORKS) else _file(item)


def _xdist_group(item: pytest.Item) -> str:
    return item.get_closest_marker("xdist_group").args[0]


@pytest.fixture(autouse=True)
def nothing_stays_deaf() -> Iterator[None]:
    """What a test starts inherits which signals are ignored: a daemon that is asked to end would not."""
    yield
    assert signal.SIG_IGN not in (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT))


@pytest.fixture(autouse=True)
def what_is_logged_is_heard() -> None:
    """Serve's logger, which our processes use, is as before anybody imported Serve or quieted it: `caplog` hears it."""
    for logger in (logging.getLogger("ray.serve"), logging.getLogger("ray")):
        logger.propagate, logger.disabled = True, False
        logger.setLevel(logging.NOTSET)
    logging.getLogger("ray.serve").handlers = []


@pytest.fixture(scope="session")
def worker_server() -> Iterator[Callable[[str], list[str]]]:
    """Fork the profiler's workers from one process instead of importing torch in each; see `forking`."""
    from tests.instruments.forking import forked_workers

    with forked_workers() as arguments:
        yield arguments


@pytest.fixture
def quick_workers(worker_server: Callable[[str], list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the profiler, gpu-lets that prepare programs, pools of hooks and the laboratory's co-runs start processes
    from it."""
    monkeypatch.setattr(f"{MEASURING}.measure.WORKER", worker_server("tenuto.profiles.measuring.profile_worker"))
    monkeypatch.setattr(f"{MEASURING}.step_worker.WORKER", worker_server(f"{MEASURING}.step_worker"))
    monkeypatch.setattr(f"{PREPARING}.WORKER", worker_server(PREPARING))
    monkeypatch.setattr(f"{POOL}.WORKER", worker_server("tenuto.deployments.entry.service.hook_process"))
    monkeypatch.setattr(f"{CO_RUN}.WORKER", worker_server(f"{CO_RUN}_worker"))


@pytest.fixture(scope="session")
def local_ray(request: pytest.FixtureRequest) -> Iterator[LocalRay]:
    """The Ray of this run, not yet connected. Its workers, and those of every Ray that a test starts, are forked. By
    day it is without what nothing of ours asks; `tests/cli/test_serve.py` starts all of it."""
    from tests.instruments.forking import forked_ray_workers

    with forked_ray_workers(is_whole=request.config.getoption("--night")):
        found = LocalRay()
        yield found
        found.forget()


@pytest.fixture(scope="module", autouse=True)
def no_ray_of_others(request: pytest.FixtureRequest) -> None:
    """A module without Ray does not see the one of tests that ran in this process before: a command would join it."""
    ray = sys.modules.get("ray")
    here = (item for item in request.session.items if item.path == request.path)
    if ray is not None and ray.is_initialized() and not any(map(_uses_ray, here)):
        request.getfixturevalue("local_ray").end()


@pytest.fixture(scope="module")
def own_ray(local_ray: LocalRay) -> None:
    """Let a test start a Ray of its own in this process."""
    local_ray.end()


@pytest.fixture(scope="module")
def launcher(local_ray: LocalRay) -> Iterator["Launcher"]:
    """A connection to this run's Ray; what a module applies is removed after its last test."""
    from tenuto.deployments.serve.applications import Applications

    local_ray.connect()
    with _launcher() as running:
        Applications().delete_ours()
        yield running


@contextmanager
def _launcher() -> Iterator["Launcher"]:
    from tenuto.deployments.serve.launcher import Launcher

    with Launcher() as running:
        running.connect(num_gpus=4)
        yield running


@pytest.fixture(scope="session")
def shared(local_ray: LocalRay) -> Iterator["SharedDeployment"]:
    """The deployment that live tests share, for those that change it; any other deployment takes it away."""
    from tests.instruments.shared_deployment import SharedDeployment

    local_ray.connect()
    with _launcher() as running:
        yield SharedDeployment(running)


@pytest.fixture(scope="session")
def shared_url(shared: "SharedDeployment") -> str:
    """Where that deployment listens, for tests that only ask."""
    return shared.url
