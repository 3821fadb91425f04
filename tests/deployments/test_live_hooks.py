"""A model of one's own with hooks of one's own on a real local Ray: raw bodies in, answers of one's own out."""

from __future__ import annotations

from pathlib import Path

import pytest

from tenuto.errors import EnvironmentFaultError, InvalidInputError
from tenuto.loadgen.bench import BenchOptions, run_bench
from tests.instruments.live import post, until
from tests.instruments.shared_deployment import SharedDeployment

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning")]


@pytest.fixture
def url(shared_url: str) -> str:
    """The processes of hooks start beside the gateways, of which each request may meet either."""
    until(lambda: all(post(f"{shared_url}/predict/own", b"[1, 2, 3, 4]")[0] == 200 for _ in range(20)))
    return shared_url


def test_a_raw_body_gets_the_answer_of_the_hooks(url: str) -> None:
    status, answer = post(f"{url}/predict/own", b"[1, 2, 3, 4]")
    assert (status, answer["prediction"]) == (200, {"sums": {"y": 30.0, "total": 10.0}})
    assert answer["parameters"]["emulated"] is False
    status, answer = post(f"{url}/predict/own", b"[1, 2]")
    assert status == 500  # another shape than the model's is the hooks' fault
    assert post(f"{url}/predict/own", b"none") == (400, {"error": "the body is no list of 4 numbers. Send JSON."})


def test_a_hook_that_hangs_leaves_the_other_process_to_the_others(url: str) -> None:
    status, answer = post(f"{url}/predict/own", b"spin", X_SLO_Ms="200")
    assert (status, answer["outcome"]) == (504, "expired")
    assert post(f"{url}/predict/own", b"[1, 2, 3, 4]")[0] == 200


def test_a_bench_sends_bodies_as_they_are(shared: SharedDeployment, url: str, tmp_path: Path) -> None:
    (tmp_path / "one").write_bytes(b"[1, 2, 3, 4]")
    (tmp_path / "two").write_bytes(b"[0, 0, 0, 1]")
    options = BenchOptions(url, duration_s=2.0, clients=0, bodies={"own": str(tmp_path)})
    result = run_bench([shared.plan.model("own")], options)
    assert result.errors == []
    found = result.summary["models"]["own"]
    assert found["ok"] == found["offered"] > 0
    (tmp_path / "three").write_bytes(b"none")
    with pytest.raises(InvalidInputError, match="refused by the model: the body is no list of 4 numbers"):
        run_bench([shared.plan.model("own")], options)


def test_hooks_that_fail_with_their_own_example_end_the_deployment(shared: SharedDeployment) -> None:
    with pytest.raises(EnvironmentFaultError, match="failed with their own example"):
        shared.apply(hooks="Halves")
