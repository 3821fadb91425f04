"""Who a client is and what it may do, by keys of which only hashes are kept."""

import hashlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenuto.deployments.security.keys import ENVIRONMENT, Caller, Callers, KeyEntry, new_key, presented_key, read_keys
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


def test_a_rate_of_tokens_is_paid_for_afterwards() -> None:
    caller = Caller(KeyEntry(name="a", sha256=HASH, tokens_per_s=100))
    assert caller.text_wait_s(1.0, 8) == 0.0
    caller.begin_text(400, 1)
    assert caller.text_wait_s(1.0, 8) == pytest.approx(3.01)
    assert caller.text_wait_s(3.0, 8) == pytest.approx(1.01)
    assert caller.text_wait_s(4.1, 8) == 0.0
    caller.spend_text()
    assert caller.text_wait_s(4.2, 8) == 0.0
    free = Caller(KeyEntry(name="b", sha256="1" * 64))
    free.begin_text(10**9, 10**9)
    assert free.text_wait_s(0.0, 10**9) == 0.0


def test_many_answers_at_once_are_no_way_round_a_rate_of_tokens() -> None:
    caller = Caller(KeyEntry(name="a", sha256="0" * 64, tokens_per_s=100.0))
    assert caller.text_wait_s(1.0, 10**6) == 0.0  # one answer alone may cost more
    begun = 0
    while caller.text_wait_s(1.0, 501) == 0.0:
        caller.begin_text(1, 500)
        begun += 1
    assert begun == 11  # a minute of its rate, less the prompts
    assert 0.0 < caller.text_wait_s(1.0, 501) <= 60.0
    for _ in range(500):
        caller.spend_text()
    caller.end_text(0)
    assert caller.text_wait_s(10.0, 501) == 0.0
    for _ in range(10):
        caller.end_text(500)  # the others left
    assert caller.text_wait_s(10.0, 10**6) == 0.0


@given(st.floats(0.5, 1000.0), st.integers(1, 50), st.lists(st.floats(0.0, 0.5), min_size=1, max_size=300))
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


class Gateways:
    """Gateways that tell each other once a second how often a client asks them."""

    def __init__(self, count: int, entry: KeyEntry) -> None:
        self.all = [Callers([entry]) for _ in range(count)]
        self._callers = [callers.find(b"x") for callers in self.all]
        self.now_s = 0.0

    def second(self, asks: list[int]) -> int:
        """Let a second pass in which each is asked so often, evenly; return how many were let pass."""
        passed = 0
        for caller, count in zip(self._callers, asks, strict=True):
            assert caller is not None
            passed += sum(caller.wait_s(self.now_s + n / count) == 0.0 for n in range(count))
        self.now_s += 1.0
        asked = [callers.count(1.0) for callers in self.all]
        for callers in self.all:
            callers.share(asked)
        return passed


ENTRY = KeyEntry(name="a", sha256=hashlib.sha256(b"x").hexdigest(), rate_rps=40.0)


@given(st.lists(st.integers(0, 120), min_size=1, max_size=5), st.lists(st.integers(0, 120), min_size=5, max_size=5))
def test_a_rate_holds_for_all_gateways_together_wherever_the_client_asks(asks: list[int], then: list[int]) -> None:
    gateways = Gateways(len(asks), ENTRY)
    first = [gateways.second(asks) for _ in range(12)]
    later = [gateways.second(then[: len(asks)]) for _ in range(12)]
    assert sum(later) <= len(later) * 40.0 + 40.0
    for passed, asked in ((first, sum(asks)), (later, sum(then[: len(asks)]))):
        settled = passed[4:]  # the parts follow the client
        assert sum(settled) <= len(settled) * 40.0 + 40.0  # what the buckets hold passes once
        assert sum(settled) >= 0.9 * len(settled) * min(40.0, asked) - len(asks)


def test_a_new_key_file_leaves_unchanged_clients_what_they_have() -> None:
    callers = Callers([ENTRY])
    known = callers.find(b"x")
    callers.follow([ENTRY, KeyEntry(name="b", sha256=HASH)])
    assert callers.find(b"x") is known
    callers.follow([ENTRY.model_copy(update={"rate_rps": 1.0})])
    changed = callers.find(b"x")
    assert changed is not known
    assert changed is not None
    assert changed.entry.rate_rps == 1.0
    callers.follow([])
    assert callers.find(b"x") is None


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
