"""Who a client is and what it may do, by keys of which only hashes are kept."""

import hashlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenuto.deployments.security.keys import (
    ENVIRONMENT,
    Caller,
    Callers,
    KeyEntry,
    new_key,
    presented_key,
    read_keys,
)
from tenuto.errors import InvalidInputError

HASH = hashlib.sha256(b"k").hexdigest()


def test_a_new_key_is_found_by_its_hash_and_no_other_is() -> None:
    key, digest = new_key()
    callers = Callers([KeyEntry(name="a", sha256=digest)])
    found = callers.find(key.encode())
    assert found is not None
    assert found.name == "a"
    assert callers.find(key.encode()) is found
    for other in (key.encode() + b"x", b"", digest.encode(), b"\xff" * 100_000):
        assert callers.find(other) is None
    assert not Callers()


@pytest.mark.parametrize(
    ("headers", "key"),
    [
        ({b"authorization": b"Bearer k"}, b"k"),
        ({b"authorization": b"bearer  k "}, b"k"),
        ({b"x-api-key": b"k"}, b"k"),
        ({b"authorization": b"Basic k"}, None),
        ({}, None),
    ],
)
def test_where_a_key_is_shown(headers: dict[bytes, bytes], key: bytes | None) -> None:
    assert presented_key(headers) == key


def test_a_client_may_ask_for_its_models() -> None:
    caller = Caller(KeyEntry(name="a", sha256=HASH, models=("resnet*", "bert")))
    assert [caller.may_ask(model) for model in ("resnet50", "bert", "bert2", "x")] == [True, True, False, False]


@given(
    st.floats(0.5, 1000.0), st.integers(1, 50),
    st.lists(st.floats(0.0, 0.5), min_size=1, max_size=300),
)  # fmt: skip
def test_never_more_than_the_burst_and_the_rate_and_waiting_as_told_is_enough(
    rate: float, burst: int, gaps: list[float]
) -> None:
    caller = Caller(KeyEntry(name="a", sha256=HASH, rate_rps=rate, burst=burst))
    now = taken = 0.0
    for gap in gaps:
        now += gap
        wait_s = caller.wait_s(now)
        if wait_s == 0.0:
            taken += 1
        else:
            now += wait_s + 1e-9
            assert caller.wait_s(now) < 1e-6
            taken += 1
    assert taken <= burst + rate * now + 1e-6


def test_keys_come_from_a_file_and_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text(f"keys:\n  - {{name: a, sha256: {HASH}, models: [m], rate_rps: 5}}\n")
    other = hashlib.sha256(b"other").hexdigest()
    monkeypatch.setenv(ENVIRONMENT, f"b:{other}")
    assert [(entry.name, entry.models) for entry in read_keys(file)] == [("a", ("m",)), ("b", ("*",))]
    monkeypatch.setenv(ENVIRONMENT, f"a:{HASH}")
    with pytest.raises(InvalidInputError, match=r"keys\.name: 'a': is given twice"):
        read_keys(file)
    monkeypatch.setenv(ENVIRONMENT, "a:secret")
    with pytest.raises(InvalidInputError, match="`tenuto key NAME` makes a key"):
        read_keys(None)
