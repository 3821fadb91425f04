"""The schedule: merged, seeded per model, hashed, saved."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tenuto.errors import InvalidInputError
from tenuto.loadgen.schedule import Schedule, make_schedule, seed_for
from tenuto.placement import Arrival, ModelSpec

A = ModelSpec(name="a", rate_rps=50, slo_ms=100)
B = ModelSpec(name="b", rate_rps=20, slo_ms=100)


def test_merged_in_order_of_time() -> None:
    schedule = make_schedule([A, B], 60.0, 0)
    assert np.all(np.diff(schedule.times_ms) >= 0)
    assert schedule.times_ms[-1] < 60_000
    assert schedule.names == ("a", "b")
    assert (schedule.model_index == 0).sum() == pytest.approx(3000, rel=0.1)
    assert (schedule.model_index == 1).sum() == pytest.approx(1200, rel=0.12)


def test_adding_a_model_leaves_the_others_as_they_were() -> None:
    both = make_schedule([A, B], 10.0, 7)
    alone = make_schedule([B], 10.0, 7)
    assert np.array_equal(both.times_ms[both.model_index == 1], alone.times_ms)


def test_zero_is_a_seed_of_its_own() -> None:
    zero = make_schedule([A], 10.0, 0)
    assert zero.hash == make_schedule([A], 10.0, 0).hash
    assert zero.hash != make_schedule([A], 10.0, 1).hash


def test_equal_models_do_not_share_arrivals() -> None:
    schedule = make_schedule([A, A.model_copy(update={"name": "c"})], 10.0, 0)
    assert not np.array_equal(
        schedule.times_ms[schedule.model_index == 0], schedule.times_ms[schedule.model_index == 1]
    )


def test_purposes_do_not_share_a_stream() -> None:
    draws = {
        seed_for(0, *purpose).random()
        for purpose in (("arrivals", "a"), ("payloads", "a"), ("arrivals", "b"), ("arrivals",))
    }
    assert len(draws) == 4


def test_the_rate_scale_scales_the_rate() -> None:
    assert len(make_schedule([A], 100.0, 0, 2.0)) == pytest.approx(10_000, rel=0.06)


def test_the_hash_sees_names_times_models_and_duration() -> None:
    base = make_schedule([A, B], 5.0, 0)
    changed = [
        Schedule(base.times_ms, base.model_index, ("a", "c"), 5.0),
        Schedule(base.times_ms + 1e-9, base.model_index, base.names, 5.0),
        Schedule(base.times_ms, 1 - base.model_index, base.names, 5.0),
        Schedule(base.times_ms, base.model_index, base.names, 6.0),
    ]
    assert len({base.hash, *(schedule.hash for schedule in changed)}) == 5


def test_what_is_saved_is_the_schedule(tmp_path: Path) -> None:
    schedule = make_schedule([A, B], 5.0, 0)
    schedule.save(tmp_path / "s.npz")
    with np.load(tmp_path / "s.npz", allow_pickle=False) as data:
        names, duration_s = tuple(data["names"].tolist()), float(data["duration_s"])
        assert Schedule(data["times_ms"], data["model_index"], names, duration_s).hash == schedule.hash


@pytest.mark.parametrize(
    ("duration_s", "seed", "scale", "where"),
    [
        (0.0, 0, 1.0, "--duration-s"),
        (1.0, -1, 1.0, "--seed"),
        (1.0, 0, 0.0, "--rate-scale"),
        (float("inf"), 0, 1.0, "--duration-s"),
        (1.0, 0, float("nan"), "--rate-scale"),
        (1e9, 0, 1.0, "--duration-s"),
    ],
)
def test_numbers_out_of_range(duration_s: float, seed: int, scale: float, where: str) -> None:
    with pytest.raises(InvalidInputError, match=where):
        make_schedule([A], duration_s, seed, scale)


def test_a_replayed_trace_has_no_rate_scale(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("time_ms\n" + "".join(f"{10 * i}\n" for i in range(200)))
    arrival = Arrival(process="trace", path=str(tmp_path / "t.csv"))
    spec = A.model_copy(update={"arrival": arrival})
    assert len(make_schedule([spec], 1.0, 0)) == 100
    with pytest.raises(InvalidInputError, match="rescale: true"):
        make_schedule([spec], 1.0, 0, 2.0)
    rescaled = spec.model_copy(update={"arrival": arrival.model_copy(update={"options": {"rescale": True}})})
    assert len(make_schedule([rescaled], 1.0, 0, 2.0)) == pytest.approx(100, abs=2)


def test_all_problems_at_once() -> None:
    with pytest.raises(InvalidInputError) as caught:
        make_schedule([A], -1.0, -1, -1.0)
    assert len(caught.value.problems) == 3


def test_a_trace_that_is_cut_says_so(tmp_path: object) -> None:
    file = f"{tmp_path}/t.csv"
    with open(file, "w", encoding="utf-8") as stream:
        stream.write("time_ms\n0\n5000\n9000\n")
    spec = ModelSpec.model_validate(
        {"name": "m", "rate_rps": 1, "slo_ms": 9, "arrival": {"process": "trace", "path": file}}
    )
    assert make_schedule([spec], 10.0, 0).notes == ()
    (note,) = make_schedule([spec], 6.0, 0).notes
    assert "only the first 6 of 9 s" in note
