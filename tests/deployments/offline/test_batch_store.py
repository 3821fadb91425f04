"""What the store of batches keeps, whoever dies: every line has one answer, and files hold what was committed."""

from __future__ import annotations

import io
import json
import os
import resource
import sqlite3
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenuto.deployments.offline.batch_store import SPARE_BYTES, BatchStore, LineAnswer, StoreError, answer_text
from tenuto.deployments.serve.user_config import OfflineOptions
from tenuto.errors import EnvironmentFaultError

URL = "/v2/models/m/infer"
KEY = "ann"


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def opened(path: Path, **how: Any) -> BatchStore:
    limits = {name: how.pop(name) for name in ("max_held_mib", "max_files", "max_lines", "keep_days") if name in how}
    store = BatchStore(OfflineOptions(path=str(path), **limits), **how)
    assert store.lock()
    store.open_database()
    return store


def request(custom_id: str, **changed: Any) -> str:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": URL, "body": {"n": 1}, **changed})


def begun(store: BatchStore, text: str, key: str = KEY, window_s: int = 60, url: str = URL) -> str:
    """A batch of a file with this text, all lines of which were looked at."""
    file = msgspec.json.decode(store.add_file(key, "in.jsonl", store.copy_file(io.BytesIO(text.encode()))))
    batch = msgspec.json.decode(store.add_batch(key, file["id"], url, f"{window_s}s", window_s, None))
    while store.validate(batch["id"]):
        pass
    return str(batch["id"])


def batch_of(store: BatchStore, batch_id: str, key: str = KEY) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.json.decode(store.document(key, "batch", batch_id))
    return found


def answer(number: int, name: str, *, is_ok: bool = True) -> LineAnswer:
    return LineAnswer(number, is_ok, answer_text(name, {"status_code": 200 if is_ok else 400, "body": {}}))


def test_uploads_at_the_same_time_hold_no_more_than_one_after_another(tmp_path: Path) -> None:
    """Each asks for room before it is copied, and others may take the room meanwhile."""
    store = opened(tmp_path, max_held_mib=1, max_files=3)
    copied = [store.copy_file(io.BytesIO(b"x" * (400 << 10))) for _ in range(4)]
    taken = []
    for file_id in copied:
        with suppress(StoreError):
            taken.append(store.add_file(KEY, "in.jsonl", file_id))
    assert len(taken) == 2
    assert len(list((tmp_path / "files").iterdir())) == 2
    store.add_file(KEY, "in.jsonl", store.copy_file(io.BytesIO(b"x" * (224 << 10))))  # all that is allowed
    with pytest.raises(StoreError, match="files are here"):
        store.add_file(KEY, "in.jsonl", store.copy_file(io.BytesIO(b"")))


def test_names_of_files_are_on_the_disk_when_the_database_knows_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a loss of power, a file whose folder was not synced may have no name, although its content was synced."""
    synced: set[str] = set()

    def note(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            synced.update(os.listdir(descriptor))

    monkeypatch.setattr(os, "fsync", note)
    store = opened(tmp_path)
    batch_id = begun(store, f"{request('a')}\n{request('b')}\n")
    (first, second) = store.pending(batch_id, -1, 3)
    store.record(batch_id, [answer(first.number, "a"), answer(second.number, "b", is_ok=False)])
    batch = ended(store, batch_id)[0]
    files = {batch[name] for name in ("input_file_id", "output_file_id", "error_file_id")}
    assert files <= synced


def work_off(store: BatchStore, batch_id: str) -> None:
    while lines := store.pending(batch_id, -1, 3):
        store.record(batch_id, [answer(line.number, line.custom_id) for line in lines])


def ended(store: BatchStore, batch_id: str, key: str = KEY) -> tuple[dict[str, Any], list[Any], list[Any]]:
    """The batch, its rows of outputs and its rows of errors, when it is over."""
    while store.finish(batch_id):
        pass
    batch = batch_of(store, batch_id, key)
    rows = []
    for name in (batch["output_file_id"], batch["error_file_id"]):
        text = "" if name is None else store.path(name).read_text()
        rows.append([json.loads(row) for row in text.splitlines()])
    return batch, *rows


def lines_of(count: int) -> str:
    return "\n".join(request(f"r{n}") for n in range(count))


def test_every_line_has_its_answer_in_the_file_of_outputs(tmp_path: Path) -> None:
    store = opened(tmp_path)
    batch_id = begun(store, lines_of(10))
    work_off(store, batch_id)
    batch, outputs, errors = ended(store, batch_id)

    assert batch["status"] == "completed"
    assert batch["request_counts"] == {"total": 10, "completed": 10, "failed": 0}
    assert [row["custom_id"] for row in outputs] == [f"r{n}" for n in range(10)]
    assert (errors, batch["error_file_id"]) == ([], None)
    listed = msgspec.json.decode(store.document(KEY, "file", batch["output_file_id"]))
    assert listed["bytes"] == store.path(listed["id"]).stat().st_size
    assert store.status().completed == 10


def test_a_file_is_read_as_other_programs_save_it(tmp_path: Path) -> None:
    """With a byte order mark, and with lines that end as on Windows."""
    store = opened(tmp_path)
    batch_id = begun(store, "\ufeff" + lines_of(3).replace("\n", "\r\n"))
    lines = store.pending(batch_id, -1, 9) or []
    work_off(store, batch_id)
    assert ended(store, batch_id)[0]["request_counts"] == {"total": 3, "completed": 3, "failed": 0}
    assert [line.custom_id for line in lines] == ["r0", "r1", "r2"]


BROKEN = {
    "{broken": "invalid_json_line",
    "[]": "invalid_request",
    '{"custom_id": "x"}': "invalid_request",
    request("x", url="/v1/completions"): "mismatched_url",
    request("x", method="GET"): "mismatched_url",
    request("x", body=3): "invalid_request",
    request("x", body={"stream": True}): "invalid_request",
    request(""): "invalid_custom_id",
    request("x" * 600): "invalid_custom_id",
    request("r0"): "duplicate_custom_id",
    request("x", body="a" * (6 << 20)): "line_too_long",
}


@pytest.mark.parametrize("line", BROKEN, ids=BROKEN.values())
def test_a_broken_line_is_answered_with_its_fault_and_the_others_go_on(tmp_path: Path, line: str) -> None:
    store = opened(tmp_path)
    batch_id = begun(store, f"{request('r0')}\n{line}\n\n{request('r1')}\n")
    work_off(store, batch_id)
    batch, outputs, errors = ended(store, batch_id)

    assert [row["custom_id"] for row in outputs] == ["r0", "r1"]
    assert [row["error"]["code"] for row in errors] == [BROKEN[line]]
    assert errors[0]["error"]["message"].startswith("line 2: ")
    assert batch["request_counts"] == {"total": 3, "completed": 2, "failed": 1}


@pytest.mark.parametrize(("text", "code"), [("", "invalid_file"), ("\n\n", "invalid_file"), ("{\n[", "invalid_file")])
def test_a_file_without_a_request_fails(tmp_path: Path, text: str, code: str) -> None:
    store = opened(tmp_path)
    batch_id = begun(store, text)

    batch = batch_of(store, batch_id)
    assert (batch["status"], batch["errors"]["data"][0]["code"]) == ("failed", code)
    assert store.pending(batch_id, -1, 5) is None
    assert not store.open_batches()


def test_more_lines_than_a_key_may_have_fail_and_others_may_go_on(tmp_path: Path) -> None:
    store = opened(tmp_path, max_lines=5)
    first, second, other = (begun(store, lines_of(3), key) for key in (KEY, KEY, "bob"))

    assert [batch_of(store, first)["status"], batch_of(store, other, "bob")["status"]] == ["in_progress"] * 2
    failed = batch_of(store, second)
    assert (failed["status"], failed["errors"]["data"][0]["code"]) == ("failed", "too_many_requests")


def test_a_key_sees_nothing_of_another(tmp_path: Path) -> None:
    store = opened(tmp_path)
    batch_id = begun(store, lines_of(1))
    file_id = batch_of(store, batch_id)["input_file_id"]

    assert store.documents("bob", "file", None, 9) == store.documents("bob", "batch", None, 9) == []
    for refused in (
        lambda: store.document("bob", "file", file_id),
        lambda: store.document("bob", "batch", batch_id),
        lambda: store.document(KEY, "batch", file_id),
        lambda: store.cancel("bob", batch_id),
        lambda: store.delete_file("bob", file_id),
        lambda: store.add_batch("bob", file_id, URL, "1h", 3600, None),
    ):
        with pytest.raises(StoreError) as caught:
            refused()
        assert caught.value.status == 404


def test_an_answer_that_comes_twice_counts_once(tmp_path: Path) -> None:
    store = opened(tmp_path)
    batch_id = begun(store, lines_of(2))
    store.record(batch_id, [answer(0, "r0")])
    store.record(batch_id, [answer(0, "r0"), answer(1, "r1", is_ok=False), answer(1, "r1")])
    batch, outputs, errors = ended(store, batch_id)

    assert ([row["custom_id"] for row in outputs], [row["custom_id"] for row in errors]) == (["r0"], ["r1"])
    assert batch["request_counts"] == {"total": 2, "completed": 1, "failed": 1}


def test_an_answer_that_comes_when_its_batch_is_over_changes_nothing(tmp_path: Path) -> None:
    store = opened(tmp_path)
    batch_id = begun(store, lines_of(2))
    store.cancel(KEY, batch_id)
    before, _, errors = ended(store, batch_id)
    store.record(batch_id, [answer(0, "r0")])
    assert (batch_of(store, batch_id), len(errors), store.open_batches()) == (before, 2, [])


def test_a_cancelled_batch_answers_what_it_did_not_ask_and_keeps_what_it_did(tmp_path: Path) -> None:
    store = opened(tmp_path)
    batch_id = begun(store, lines_of(5))
    store.record(batch_id, [answer(3, "r3")])
    assert msgspec.json.decode(store.cancel(KEY, batch_id))["status"] == "cancelling"
    assert msgspec.json.decode(store.cancel(KEY, batch_id))["status"] == "cancelling"
    assert store.pending(batch_id, -1, 9) is None
    batch, outputs, errors = ended(store, batch_id)

    assert (batch["status"], [row["custom_id"] for row in outputs]) == ("cancelled", ["r3"])
    assert {row["custom_id"]: row["error"]["code"] for row in errors} == dict.fromkeys(
        ("r0", "r1", "r2", "r4"), "batch_cancelled"
    )
    with pytest.raises(StoreError, match="cancelled"):
        store.cancel(KEY, batch_id)


def test_a_batch_that_is_cancelled_before_its_file_was_read_answers_all_lines(tmp_path: Path) -> None:
    store = opened(tmp_path)
    file = msgspec.json.decode(store.add_file(KEY, "f", store.copy_file(io.BytesIO(lines_of(2500).encode()))))
    batch_id = msgspec.json.decode(store.add_batch(KEY, file["id"], URL, "1h", 3600, None))["id"]
    store.cancel(KEY, batch_id)
    while store.validate(batch_id):
        pass
    batch, outputs, errors = ended(store, batch_id)

    assert (batch["status"], len(outputs), len({row["custom_id"] for row in errors})) == ("cancelled", 0, 2500)


def test_at_the_end_of_its_window_a_batch_expires(tmp_path: Path) -> None:
    clock = Clock()
    store = opened(tmp_path, clock=clock)
    batch_id = begun(store, lines_of(2), window_s=60)
    store.record(batch_id, [answer(0, "r0")])
    clock.now_s += 60
    assert store.pending(batch_id, -1, 9) is None
    batch, outputs, errors = ended(store, batch_id)

    assert (batch["status"], batch["expired_at"], len(outputs)) == ("expired", 1060, 1)
    assert [row["error"]["code"] for row in errors] == ["batch_expired"]


def test_a_full_disk_refuses_files_and_keeps_no_answer_until_there_is_room(tmp_path: Path) -> None:
    free = [1 << 40]
    store = opened(tmp_path, free_bytes=lambda _: free[0])
    batch_id = begun(store, lines_of(1))
    free[0] = SPARE_BYTES // 4
    with pytest.raises(StoreError) as caught:
        store.room_bytes(KEY)
    assert caught.value.status == 507
    with pytest.raises(OSError, match="the disk is full"):
        store.record(batch_id, [answer(0, "r0")])
    assert [line.custom_id for line in store.pending(batch_id, -1, 9) or ()] == ["r0"]

    free[0] = 1 << 40
    work_off(store, batch_id)
    assert len(ended(store, batch_id)[1]) == 1


def test_a_key_that_holds_all_it_may_sends_no_more(tmp_path: Path) -> None:
    store = opened(tmp_path, max_held_mib=1)
    file = msgspec.json.decode(store.add_file(KEY, "f", store.copy_file(io.BytesIO(bytes(1 << 20)))))
    with pytest.raises(StoreError) as caught:
        store.room_bytes(KEY)
    assert caught.value.status == 413
    assert store.room_bytes("bob") == 1 << 20
    store.delete_file(KEY, file["id"])
    assert store.room_bytes(KEY) == 1 << 20


def test_a_key_may_have_so_many_files_however_small_they_are(tmp_path: Path) -> None:
    store = opened(tmp_path, max_files=2)
    files = [msgspec.json.decode(store.add_file(KEY, "f", store.copy_file(io.BytesIO()))) for _ in range(2)]
    with pytest.raises(StoreError, match="2 files are here") as caught:
        store.room_bytes(KEY)
    assert caught.value.status == 413
    assert store.room_bytes("bob")
    store.delete_file(KEY, files[0]["id"])
    assert store.room_bytes(KEY)


def test_a_file_that_a_batch_reads_stays(tmp_path: Path) -> None:
    store = opened(tmp_path)
    batch_id = begun(store, lines_of(1))
    file_id = batch_of(store, batch_id)["input_file_id"]
    with pytest.raises(StoreError, match="still reads this file"):
        store.delete_file(KEY, file_id)
    work_off(store, batch_id)
    ended(store, batch_id)
    store.delete_file(KEY, file_id)
    assert not store.path(file_id).exists()


def test_what_is_over_goes_after_the_stated_days_and_nothing_sooner(tmp_path: Path) -> None:
    clock = Clock()
    store = opened(tmp_path, clock=clock, keep_days=2)
    first, waiting = begun(store, lines_of(2)), begun(store, lines_of(3), window_s=20 * 86_400)
    work_off(store, first)
    clock.now_s += 86_400
    batch, _, _ = ended(store, first)
    output = msgspec.json.decode(store.document(KEY, "file", batch["output_file_id"]))
    assert output["expires_at"] == clock.now_s + 2 * 86_400
    before = store.status()
    clock.now_s += 86_400  # what was uploaded has expired, and a batch still reads one of it
    assert not store.forget_old()
    assert [id for id, _ in store.documents(KEY, "file", None, 9)] == [
        output["id"],
        batch_of(store, waiting)["input_file_id"],
    ]
    assert store.path(output["id"]).exists()
    clock.now_s += 86_399
    store.forget_old()
    assert batch_of(store, first) == batch
    clock.now_s += 1
    store.forget_old()
    assert [id for id, _ in store.documents(KEY, "batch", None, 9)] == [waiting]
    assert sorted(path.name for path in (tmp_path / "files").iterdir()) == [batch_of(store, waiting)["input_file_id"]]
    assert (store.status().completed, before.completed) == (2, 2)  # a counter that falls would be read as a restart
    work_off(store, waiting)
    ended(store, waiting)
    clock.now_s += 2 * 86_400
    store.forget_old()
    assert (store.status().completed, store.status().bytes, [*(tmp_path / "files").iterdir()]) == (5, 0, [])


@pytest.mark.parametrize("looked_at", [False, True])
def test_a_batch_whose_file_was_deleted_from_the_disk_fails_with_what_it_has(tmp_path: Path, looked_at: bool) -> None:
    store = opened(tmp_path)
    file = msgspec.json.decode(store.add_file(KEY, "f", store.copy_file(io.BytesIO(lines_of(1500).encode()))))
    batch_id = msgspec.json.decode(store.add_batch(KEY, file["id"], URL, "1h", 3600, None))["id"]
    while store.validate(batch_id) and looked_at:
        pass
    if looked_at:
        store.record(batch_id, [answer(7, "r7")])
    (tmp_path / "files").rename(tmp_path / "away")
    with pytest.raises(FileNotFoundError):  # a whole folder that is gone may come back
        store.pending(batch_id, -1, 9) if looked_at else store.validate(batch_id)
    (tmp_path / "away").rename(tmp_path / "files")
    store.path(file["id"]).unlink()
    assert not store.validate(batch_id)
    assert store.pending(batch_id, -1, 9) is None
    batch, outputs, errors = ended(store, batch_id)
    assert (batch["status"], batch["errors"]["data"][0]["code"]) == ("failed", "file_lost")
    assert (len(outputs), len(errors)) == ((1, 1499) if looked_at else (0, 1000))
    assert {row["error"]["code"] for row in errors} == {"file_lost"}
    assert store.open_batches() == []


@pytest.mark.parametrize("left_bytes", [None, 3])
@pytest.mark.parametrize("when", ["asking", "answered", "cancelled"])
def test_a_batch_whose_answers_were_deleted_from_the_disk_fails_and_invents_none(
    tmp_path: Path, when: str, left_bytes: int | None
) -> None:
    store = opened(tmp_path)
    batch_id = begun(store, lines_of(6) + "\nno request\n")
    before = {*(tmp_path / "files").iterdir()}
    store.record(batch_id, [answer(number, f"r{number}") for number in range(6 if when == "answered" else 3)])
    (outputs_file,) = {*(tmp_path / "files").iterdir()} - before
    if left_bytes is None:
        outputs_file.unlink()
    else:
        outputs_file.write_bytes(outputs_file.read_bytes()[:left_bytes])
    if when == "cancelled":
        store.cancel(KEY, batch_id)
    assert store.pending(batch_id, -1, 9) is None
    if when != "answered":
        store.record(batch_id, [answer(3, "r3")])  # it was under way
    batch, outputs, errors = ended(store, batch_id)
    assert batch["status"] == ("cancelled" if when == "cancelled" else "failed")
    assert batch["errors"]["data"][0]["code"] == "file_lost"
    assert [row["custom_id"] for row in outputs] == ([] if when == "answered" else ["r3"])
    assert [row["error"]["code"] for row in errors[:1]] == ["invalid_json_line"]
    unasked = {"asking": ["file_lost"] * 2, "cancelled": ["batch_cancelled"] * 2, "answered": []}
    assert [row["error"]["code"] for row in errors[1:]] == unasked[when]
    assert store.open_batches() == []


def test_lists_go_on_behind_an_id(tmp_path: Path) -> None:
    store = opened(tmp_path)
    made = [begun(store, lines_of(1)) for _ in range(5)]
    first = [name for name, _ in store.documents(KEY, "batch", None, 2)]
    then = [name for name, _ in store.documents(KEY, "batch", first[-1], 9)]
    assert first + then == made[::-1]


@pytest.mark.parametrize("damage", [b"no database at all, but long enough to be read as one", b""])
def test_a_damaged_database_is_told_with_its_cure(tmp_path: Path, damage: bytes) -> None:
    store = opened(tmp_path)
    begun(store, lines_of(400))
    store.close()
    path = tmp_path / "offline.db"
    data = path.read_bytes()
    path.write_bytes(damage or data[:8192] + b"\xff" * 4096 + data[12288:])

    store = BatchStore(OfflineOptions(path=str(tmp_path)))
    with pytest.raises(EnvironmentFaultError, match="move it away"):
        store.open_database()
    with pytest.raises(StoreError) as caught:
        store.documents(KEY, "file", None, 1)
    assert caught.value.status == 503


@pytest.mark.parametrize("deleted", ["offline.db*", "offline.db", "offline.db-wal"])
def test_a_database_that_is_deleted_under_the_store_is_written_anew(tmp_path: Path, deleted: str) -> None:
    store = opened(tmp_path)
    batch_id = begun(store, lines_of(4))
    store.record(batch_id, [answer(0, "r0")])
    for path in tmp_path.glob(deleted):
        path.unlink()
    store.record(batch_id, [answer(1, "r1")])
    store.check_database()
    store.record(batch_id, [answer(2, "r2")])
    assert {path.name for path in tmp_path.glob("*.new*")} == set()

    after_kill = opened(tmp_path)
    assert [line.custom_id for line in after_kill.pending(batch_id, -1, 9) or ()] == ["r3"]
    work_off(after_kill, batch_id)
    assert [row["custom_id"] for row in ended(after_kill, batch_id)[1]] == ["r0", "r1", "r2", "r3"]


def test_another_database_in_the_place_of_the_first_is_opened_anew(tmp_path: Path) -> None:
    store = opened(tmp_path / "store")
    begun(store, lines_of(1))
    other = opened(tmp_path / "other")
    batch_id = begun(other, lines_of(2))
    other.close()
    (tmp_path / "other" / "offline.db").rename(tmp_path / "store" / "offline.db")
    with pytest.raises(EnvironmentFaultError, match="replaced"):
        store.check_database()
    assert not store.is_open
    store.open_database()
    assert [id for id, _ in store.open_batches()] == [batch_id]


def test_a_folder_that_is_gone_is_named_until_it_is_there_again(tmp_path: Path) -> None:
    store = opened(tmp_path / "store")
    batch_id = begun(store, lines_of(1))
    (tmp_path / "store").rename(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="make it again"):
        store.check_database()
    with pytest.raises(OSError, match=r"files/file-"):
        store.pending(batch_id, -1, 9)
    (tmp_path / "elsewhere").rename(tmp_path / "store")
    store.check_database()
    work_off(store, batch_id)
    assert len(ended(store, batch_id)[1]) == 1


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """No file can grow beyond a size, as on a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_what_a_disk_refuses_is_kept_when_it_has_room(tmp_path: Path) -> None:
    store = opened(tmp_path)
    batch_id = begun(store, lines_of(3))
    log_bytes = (tmp_path / "offline.db-wal").stat().st_size
    before = sorted((tmp_path / "files").iterdir())
    with file_size_limit(log_bytes):
        with pytest.raises(OSError, match="too large"):
            store.copy_file(io.BytesIO(bytes(log_bytes + 1)))
        with pytest.raises(OSError, match="too large"):
            store.record(batch_id, [LineAnswer(0, True, bytes(log_bytes + 1))])
        with pytest.raises(sqlite3.OperationalError):
            store.record(batch_id, [answer(0, "r0")])
        with pytest.raises(sqlite3.OperationalError):
            store.add_file(KEY, "in.jsonl", store.copy_file(io.BytesIO(b"small")))
        assert len(store.documents(KEY, "file", None, 9)) == 1
    outputs = {path.name for path in (tmp_path / "files").iterdir()} - {path.name for path in before}
    assert len(outputs) == 1  # the file of outputs alone, of which nothing counts

    work_off(store, batch_id)
    assert [row["custom_id"] for row in ended(store, batch_id)[1]] == ["r0", "r1", "r2"]


def test_one_process_has_the_store_until_it_ends(tmp_path: Path) -> None:
    code = (
        "import sys, time\nfrom tenuto.deployments.offline.batch_store import BatchStore\n"
        "from tenuto.deployments.serve.user_config import OfflineOptions\n"
        "store = BatchStore(OfflineOptions(path=sys.argv[1]))\nprint(store.lock(), flush=True)\ntime.sleep(1000)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "True\n"
        store = BatchStore(OfflineOptions(path=str(tmp_path)))
        assert not store.lock()
        other.kill()
        other.wait()
        assert store.lock()


@given(st.lists(st.sampled_from(["ask", "keep", "fail", "kill", "half"]), max_size=30), st.integers(1, 12))
def test_whatever_dies_when_every_line_is_answered_once(
    tmp_path_factory: pytest.TempPathFactory, steps: list[str], count: int
) -> None:
    path = tmp_path_factory.mktemp("store")
    store = opened(path)
    batch_id = begun(store, lines_of(count))
    asked: list[Any] = []
    for step in steps:
        if step == "ask":
            asked += store.pending(batch_id, -1, 3) or ()
        elif step in ("keep", "fail"):
            store.record(batch_id, [answer(each.number, each.custom_id, is_ok=step == "keep") for each in asked[:2]])
            asked = asked[2:]
        else:
            if step == "half":
                for file in (path / "files").iterdir():
                    if b"status_code" in file.read_bytes():  # killed between its file and its transaction
                        file.write_bytes(file.read_bytes() + answer(0, "r0").text + b'{"half')
                (path / "files" / "file-x.part").write_bytes(b"of an upload")
            store.close()
            asked, store = [], opened(path)
            assert not list((path / "files").glob("*.part"))
    work_off(store, batch_id)
    _, outputs, errors = ended(store, batch_id)
    store.close()

    assert sorted(row["custom_id"] for row in outputs + errors) == sorted(f"r{n}" for n in range(count))
