"""Files and batches through a gateway's own socket, as OpenAI's client sends them, in front of fake gpu-lets."""

from __future__ import annotations

import asyncio
import hashlib
import json
import tempfile
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types import Batch

from tenuto.deployments.offline.batch_runner import BatchRunner, LineReply, share_of
from tenuto.deployments.offline.batch_store import BatchStore
from tenuto.deployments.offline.store_process import OfflineWork
from tenuto.deployments.serve.user_config import OfflineOptions, read_gateway_config
from tenuto.deployments.wire.peer import Endpoint
from tests.deployments.entry import test_generation
from tests.deployments.entry.test_gateway import PLAN, TENSOR, Bench
from tests.deployments.offline.test_batch_store import KEY, batch_of
from tests.deployments.offline.test_batch_store import begun as begun_on_disk
from tests.instruments.asking import PATIENCE_S, http_client, openai_client, until
from tests.instruments.fake_gpulet import FakeGpulet

URL = "/v2/models/m/infer"
ANY: Any = URL
KEYS = {"anna": "key of anna", "ben": "key of ben"}
ENTRIES = [
    {"name": name, "sha256": hashlib.sha256(key.encode()).hexdigest(), "models": ["m"] if name == "anna" else ["n"]}
    for name, key in KEYS.items()
]


class Offline:
    """A gateway, and beside it the store, which may die."""

    def __init__(self, path: Path) -> None:
        self.options = OfflineOptions(path=str(path / "store"), under_way=4, max_file_mib=4)
        self.bench = Bench(find_store=self._find_store)
        self.work: OfflineWork | None = None
        self.settings: dict[str, Any] = {}
        self._clients: list[openai.AsyncOpenAI] = []

    async def _find_store(self) -> Endpoint:
        if self.work is None:
            raise LookupError("the store is not there")
        return await self.work.listen("127.0.0.1", encrypted=False)

    async def start(self, **settings: Any) -> None:
        self.settings = {"offline": self.options.model_dump(), "scheduler": "deferred", **settings}
        for gpulet in self.bench.gpulets.values():
            await gpulet.start()
        await self.bench.follow(PLAN, **self.settings)
        await self.begin_store()

    async def begin_store(self) -> None:
        async def find() -> Endpoint:
            return await self.bench.entry.endpoint("")

        self.work = OfflineWork(self.options, lambda _name: find)
        settings = {"plan": PLAN.to_data(), **self.settings, "scheduler": {"name": self.settings["scheduler"]}}
        await self.work.follow(read_gateway_config(settings))
        await until(lambda: self.work is not None and self.work.store.is_open)

    async def end_store(self) -> None:
        if self.work is not None:
            work, self.work = self.work, None
            await work.close()

    def client(self, key: str = "none") -> openai.AsyncOpenAI:
        url = f"http://127.0.0.1:{self.bench.port}/v1"
        made = openai_client(url, KEYS.get(key, key))
        self._clients.append(made)
        return made

    async def close(self) -> None:
        for client in self._clients:
            await client.close()
        await self.end_store()
        await self.bench.close()


@pytest.fixture(autouse=True)
def own_temporary_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the process back the folder for temporary files, which the store takes for its uploads."""
    monkeypatch.setattr(tempfile, "tempdir", tempfile.tempdir)


@pytest.fixture
async def offline(tmp_path: Path) -> AsyncIterator[Offline]:
    made = Offline(tmp_path)
    yield made
    await made.close()


def lines(count: int, url: str = URL) -> bytes:
    rows = (
        {"custom_id": f"r{n}", "method": "POST", "url": url, "body": {"inputs": [{**TENSOR, "data": [n, 0]}]}}
        for n in range(count)
    )
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


async def over(client: openai.AsyncOpenAI, batch: Batch) -> Batch:
    async with asyncio.timeout(PATIENCE_S):
        while batch.status not in ("completed", "failed", "expired", "cancelled"):
            await asyncio.sleep(0.05)
            batch = await client.batches.retrieve(batch.id)
    return batch


async def begun(client: openai.AsyncOpenAI, content: bytes, url: str = URL) -> Batch:
    file = await client.files.create(file=("in.jsonl", content), purpose="batch")
    endpoint: Any = url
    return await client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h")


async def held(offline: Offline, count: int) -> tuple[FakeGpulet, openai.AsyncOpenAI, Batch]:
    """Begin a batch of so many lines, and return when the gpu-let has some and answers none."""
    gpulet, client = offline.bench.gpulets["a"], offline.client()
    gpulet.hold = True
    batch = await begun(client, lines(count))
    await asyncio.wait_for(gpulet.arrived.wait(), PATIENCE_S)
    return gpulet, client, batch


async def rows(client: openai.AsyncOpenAI, file_id: str | None) -> list[dict[str, Any]]:
    if file_id is None:
        return []
    return [json.loads(row) for row in (await client.files.content(file_id)).text.splitlines()]


@pytest.mark.parametrize("scheduler", ["deferred", "eager"])
async def test_openais_client_has_a_batch_answered(offline: Offline, scheduler: str) -> None:
    await offline.start(scheduler=scheduler)
    client = offline.client()
    batch = await over(client, await begun(client, lines(20)))
    counts = batch.request_counts
    assert counts is not None
    assert (batch.status, counts.total, counts.completed, counts.failed) == ("completed", 20, 20, 0)

    answers = {row["custom_id"]: row["response"] for row in await rows(client, batch.output_file_id)}
    assert {name: answer["body"]["outputs"][0]["data"] for name, answer in answers.items()} == {
        f"r{n}": [2.0 * n, 0.0] for n in range(20)
    }
    assert {answer["status_code"] for answer in answers.values()} == {200}
    assert max(offline.bench.gpulets["a"].sizes) <= offline.options.under_way
    assert [each.id async for each in client.batches.list(limit=1)] == [batch.id]
    assert {each.id async for each in client.files.list()} == {batch.input_file_id, batch.output_file_id}
    assert (await client.files.retrieve(batch.input_file_id)).filename == "in.jsonl"
    assert (await client.files.delete(batch.input_file_id)).deleted
    with pytest.raises(openai.NotFoundError, match="no file"):
        await client.files.retrieve(batch.input_file_id)


async def test_a_part_of_a_file_is_given_and_a_wrong_range_refused_as_openai_does(offline: Offline) -> None:
    await offline.start()
    file = await offline.client().files.create(file=lines(3), purpose="batch")
    for given, status in (("bytes=1-4", 206), ("bytes=9999999-", 416), ("lines=1-2", 400), ("bytes=", 400)):
        answer = await offline.bench.client.get(f"/v1/files/{file.id}/content", headers={"range": given})
        assert answer.status_code == status, answer.text
        if status == 206:
            assert answer.content == lines(3)[1:5]
        else:
            assert answer.json()["error"]["message"].startswith("header range must name bytes")
        assert (answer.headers.get("content-range") == f"bytes */{len(lines(3))}") == (status == 416)


async def test_what_the_model_refuses_is_in_the_file_of_errors(offline: Offline) -> None:
    await offline.start()
    client = offline.client()
    missing = await over(client, await begun(client, lines(2, "/v2/models/none/infer"), "/v2/models/none/infer"))
    wrong = await over(client, await begun(client, lines(1).replace(b"FP32", b"INT8") + lines(2).splitlines()[1]))

    errors = await rows(client, missing.error_file_id)
    assert (missing.status, {row["response"]["status_code"] for row in errors}) == ("completed", {404})
    assert [row["response"]["status_code"] for row in await rows(client, wrong.error_file_id)] == [400]
    assert [row["custom_id"] for row in await rows(client, wrong.output_file_id)] == ["r1"]


def row(number: int, url: str, body: dict[str, Any]) -> bytes:
    return json.dumps({"custom_id": f"r{number}", "method": "POST", "url": url, "body": body}).encode() + b"\n"


@pytest.mark.parametrize("scheduler", ["deferred", "eager"])
async def test_a_line_that_can_never_be_answered_well_ends_as_an_error(offline: Offline, scheduler: str) -> None:
    await offline.start(scheduler=scheduler)
    client = offline.client()
    soon = [{"slo_ms": 1e-6}, {"timeout": 1}]
    late = [row(n, URL, {"inputs": [TENSOR], "parameters": own}) for n, own in enumerate(soon)]
    batch = await over(client, await begun(client, b"".join(late)))
    assert {each["response"]["status_code"] for each in await rows(client, batch.error_file_id)} <= {504}

    text: Any = "/v1/completions"
    odd: list[Any] = [5, None, ["a"], {}, "", "none", "\x00"]
    batch = await over(
        client, await begun(client, b"".join(row(n, text, {"model": m}) for n, m in enumerate(odd)), text)
    )
    errors = await rows(client, batch.error_file_id)
    assert (batch.status, len(errors)) == ("completed", len(odd))
    assert {each["response"]["status_code"] for each in errors} <= {400, 404}


async def test_a_line_with_which_asking_fails_is_answered(tmp_path: Path) -> None:
    async def fail(_key: str, _line: object) -> LineReply:
        raise KeyError("a fault")

    with ThreadPoolExecutor(1) as thread:
        store = BatchStore(OfflineOptions(path=str(tmp_path / "store")))
        runner = BatchRunner(store, thread, fail)
        assert await runner.on_disk(store.lock)
        await runner.on_disk(store.open_database)
        batch_id = await runner.on_disk(lambda: begun_on_disk(store, lines(3).decode(), url=URL))
        runs = asyncio.create_task(runner.run())
        async with asyncio.timeout(PATIENCE_S):
            while (batch := await runner.on_disk(batch_of, store, batch_id, KEY))["status"] != "completed":
                await asyncio.sleep(0.05)
        runs.cancel()
        errors = store.path(batch["error_file_id"]).read_text().splitlines()
        assert ["Incident" in line for line in errors] == [True] * 3
        await runner.on_disk(store.close)


@pytest.mark.parametrize("where", ["body", "inputs", "surprise", "line"])
async def test_a_line_that_is_nested_too_deeply_stops_no_other(offline: Offline, where: str) -> None:
    await offline.start()
    client = offline.client()
    deep = b"[" * 100_000 + b"]" * 100_000
    good, other = lines(2).splitlines()
    line = {"body": good.replace(b'{"inputs": ', b'{"more": %b, "inputs": ' % deep, 1), "line": deep}
    line |= {"inputs": good.replace(b'"inputs": [', b'"inputs": [%b, ' % deep, 1), "surprise": b'{"a": %b}' % deep}
    batch = await over(client, await begun(client, line[where] + b"\n" + other))
    assert (batch.status, batch.request_counts and batch.request_counts.failed) == ("completed", 1)
    assert [row["custom_id"] for row in await rows(client, batch.output_file_id)] == ["r1"]


async def test_a_batch_with_which_the_store_fails_stops_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def ask(_key: str, _line: object) -> LineReply:
        return LineReply(200, b"{}")

    with ThreadPoolExecutor(1) as thread:
        store = BatchStore(OfflineOptions(path=str(tmp_path / "store")))
        runner = BatchRunner(store, thread, ask)
        assert await runner.on_disk(store.lock)
        await runner.on_disk(store.open_database)
        ids = [await runner.on_disk(lambda: begun_on_disk(store, lines(3).decode(), url=URL)) for _ in range(2)]
        validate = store.validate

        def fail_at_first(batch_id: str) -> bool:
            if batch_id == ids[0]:
                raise KeyError("a fault")
            return validate(batch_id)

        monkeypatch.setattr(store, "validate", fail_at_first)
        runs = asyncio.create_task(runner.run())
        async with asyncio.timeout(PATIENCE_S):
            while (await runner.on_disk(batch_of, store, ids[1], KEY))["status"] != "completed":
                await asyncio.sleep(0.05)
        assert not runs.done()
        runs.cancel()
        await runner.on_disk(store.close)


async def test_a_store_that_dies_goes_on_where_it_was(offline: Offline) -> None:
    await offline.start()
    gpulet, client, batch = await held(offline, 12)
    await offline.end_store()
    with pytest.raises(openai.InternalServerError, match="does not answer"):
        await client.batches.retrieve(batch.id)
    gpulet.hold = False
    gpulet.release()
    await offline.begin_store()
    ended = await over(client, batch)

    answered = [row["custom_id"] for row in await rows(client, ended.output_file_id)]
    assert sorted(answered) == sorted(f"r{n}" for n in range(12))
    assert ended.error_file_id is None


async def test_lines_whose_gpulet_dies_are_asked_again(offline: Offline) -> None:
    await offline.start()
    gpulet, client, batch = await held(offline, 6)
    gpulet.die()
    gpulet.hold = False
    await gpulet.start()
    ended = await over(client, batch)

    assert (ended.status, ended.error_file_id) == ("completed", None)
    assert len(await rows(client, ended.output_file_id)) == 6


async def test_a_batch_is_cancelled_half_way(offline: Offline) -> None:
    await offline.start()
    gpulet, client, batch = await held(offline, 30)
    for _ in range(2):
        assert (await client.batches.cancel(batch.id)).status == "cancelling"
    gpulet.hold = False
    gpulet.release()
    ended = await over(client, batch)

    done, left = await rows(client, ended.output_file_id), await rows(client, ended.error_file_id)
    assert (ended.status, {row["error"]["code"] for row in left}) == ("cancelled", {"batch_cancelled"})
    with pytest.raises(openai.ConflictError, match="is cancelled"):
        await client.batches.cancel(batch.id)
    assert sorted(row["custom_id"] for row in done + left) == sorted(f"r{n}" for n in range(30))


async def test_a_batch_that_waits_keeps_no_other_from_its_place(offline: Offline) -> None:
    await offline.start()
    _, client, waits = await held(offline, 30)
    url = "/v2/models/n/infer"
    other = await over(client, await begun(client, lines(9, url), url))

    assert (other.status, len(await rows(client, other.output_file_id))) == ("completed", 9)
    assert (await client.batches.retrieve(waits.id)).status == "in_progress"


async def test_a_key_has_files_and_models_of_its_own(offline: Offline) -> None:
    await offline.start(keys=ENTRIES)
    anna, ben = offline.client("anna"), offline.client("ben")
    batch = await over(anna, await begun(anna, lines(2)))
    others = await over(ben, await begun(ben, lines(2)))

    assert [row["response"]["status_code"] for row in await rows(ben, others.error_file_id)] == [403, 403]
    assert [each.id async for each in ben.batches.list()] == [others.id]
    read, written = batch.input_file_id, batch.output_file_id
    assert written is not None
    for attempt in (
        *(ben.files.content(each) for each in (read, written)),
        *(ben.files.delete(each) for each in (read, written)),
        ben.batches.retrieve(batch.id),
        ben.batches.cancel(batch.id),
        ben.batches.create(input_file_id=read, endpoint=ANY, completion_window="24h"),
    ):
        with pytest.raises(openai.NotFoundError):
            await attempt
    assert len((await anna.files.content(written)).text.splitlines()) == 2
    with pytest.raises(openai.AuthenticationError):
        await offline.client("unknown").files.list()
    with pytest.raises(openai.AuthenticationError):
        await begun(offline.client("unknown"), lines(10_000))


async def test_lines_keep_to_the_rate_of_their_key(offline: Offline) -> None:
    """Those beyond it are asked when it allows them: two at once here, and the third in a quarter of an hour."""
    await offline.start(keys=[{**ENTRIES[0], "rate_rps": 0.001, "burst": 2}])
    work = offline.work
    assert work is not None
    batch_id = await work.runner.on_disk(begun_on_disk, work.store, lines(3).decode(), "anna", 60, URL)

    async def completed() -> int:
        batch = await work.runner.on_disk(batch_of, work.store, batch_id, "anna")
        return int(batch["request_counts"]["completed"] + 10 * batch["request_counts"]["failed"])

    async with asyncio.timeout(PATIENCE_S):
        while await completed() < 2:
            await asyncio.sleep(0.05)
    assert work.store.pending(batch_id, -1, 9) is not None
    assert await completed() == 2


def test_keys_share_what_is_under_way_and_so_do_the_batches_of_each() -> None:
    keys = ["anna", "anna", "anna", "ben"]
    assert [share_of(key, keys, 60) for key in ("anna", "ben")] == [10, 30]
    assert share_of("anna", keys, 2) == 1


async def test_only_gateways_reach_the_store(offline: Offline) -> None:
    await offline.start(keys=ENTRIES)
    assert offline.work is not None
    place = await offline.work.listen("127.0.0.1", encrypted=False)
    port = place.address[1]
    named = {"x-tenuto-client": "anna", "x-tenuto-token": "guessed"}
    async with http_client(port) as direct:
        assert (await direct.get("/v1/files", headers=named)).status_code == 403
    lied = {"authorization": f"Bearer {KEYS['ben']}", "x-tenuto-client": "anna"}
    anna = offline.client("anna")
    await begun(anna, lines(1))
    seen = await offline.bench.client.get("/v1/files", headers=lied)
    assert (seen.status_code, seen.json()["data"]) == (200, [])


@pytest.mark.parametrize(
    ("form", "status", "words"),
    [
        ({"data": {"purpose": "batch"}, "files": {"file": b"{}"}}, 200, ""),
        ({"data": {"purpose": "vision"}, "files": {"file": b"{}"}}, 400, "purpose=batch"),
        ({"data": {"purpose": "batch"}, "files": {"other": b"{}"}}, 400, "purpose=batch"),
        ({"data": {"purpose": "batch"}}, 400, "boundary|purpose=batch"),
        ({"data": {"purpose": "b" * 9000}, "files": {"file": b"{}"}}, 400, "not well-formed"),
        ({"files": {"file": bytes(5 << 20)}}, 413, "may have 4 MiB"),
    ],
)
async def test_forms_that_are_no_file_are_refused(
    offline: Offline, form: dict[str, Any], status: int, words: str
) -> None:
    await offline.start()
    answer = await offline.bench.client.post("/v1/files", **form)
    assert answer.status_code == status, answer.text
    if words:
        assert any(word in answer.json()["error"]["message"] for word in words.split("|"))


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"endpoint": "/v1/files"}, "takes no batches"),
        ({"endpoint": "/predict/m"}, "takes no batches"),
        ({"endpoint": URL, "completion_window": "soon"}, "completion_window"),
        ({"endpoint": URL, "completion_window": "31d"}, "completion_window"),
        ({"endpoint": URL, "surprise": 1}, "surprise"),
        ({"endpoint": URL, "metadata": {"a": 1}}, "valid string"),
    ],
)
async def test_batches_that_cannot_be_are_refused(offline: Offline, body: dict[str, Any], words: str) -> None:
    await offline.start()
    answer = await offline.bench.client.post("/v1/batches", json={"input_file_id": "file-x", **body})
    assert (answer.status_code, words in answer.json()["error"]["message"]) == (400, True)


@pytest.mark.parametrize(
    ("method", "path", "content", "status"),
    [
        ("POST", "/v1/files", b"no form", 400),
        ("PUT", "/v1/files", b"", 405),
        ("DELETE", "/v1/batches/x", b"", 405),
        ("GET", "/v1/files/a/b/c", b"", 404),
        ("GET", "/v1/files?limit=none", b"", 400),
        ("POST", "/v1/batches", b"", 400),
        ("POST", "/v1/batches", b"{", 400),
        ("POST", "/v1/batches", b"[]", 400),
        ("POST", "/v1/batches", b"[" * 60_000, 400),
        ("POST", "/v1/batches", b'{"input_file_id": "\\ud800", "endpoint": "/v1/completions"}', 400),
        ("POST", "/v1/batches", b'{"input_file_id": "\\u0000", "endpoint": "/v1/completions"}', 404),
        ("POST", "/v1/batches", b'{"input_file_id": "file-x", "endpoint": "/v1/completions"}', 404),
    ],
)
async def test_every_refusal_is_openais_whatever_type_a_body_is_said_to_have(
    offline: Offline, method: str, path: str, content: bytes, status: int
) -> None:
    await offline.start()
    answer = await offline.bench.client.request(method, path, content=content)
    assert answer.status_code == status, answer.text
    assert answer.json()["error"]["message"]


@pytest.mark.parametrize("is_chunked", [False, True])
async def test_the_store_keeps_no_large_body_but_a_file(offline: Offline, is_chunked: bool) -> None:
    await offline.start()

    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(3):
            yield b" " * 30_000

    content = chunks() if is_chunked else b" " * 90_000
    answer = await offline.bench.client.post("/v1/batches", content=content)
    assert (answer.status_code, "64 KiB" in answer.text) == (413, True)
    assert (await offline.bench.client.get("/v1/batches")).status_code == 200


async def test_a_body_in_chunks_of_more_than_a_gateway_takes_goes_on_to_the_disk(offline: Offline) -> None:
    await offline.start(max_body_mib=1)
    part = b'--b\r\nContent-Disposition: form-data; name="%b\r\n\r\n'

    async def form() -> AsyncIterator[bytes]:
        yield part % b'purpose"' + b"batch\r\n" + part % b'file"; filename="f"'
        for _ in range(30):
            yield b"x" * 100_000
        yield b"\r\n--b--\r\n"

    kind = {"content-type": "multipart/form-data; boundary=b"}
    made = await offline.bench.client.post("/v1/files", content=form(), headers=kind)
    assert (made.status_code, made.json()["bytes"]) == (200, 3_000_000)
    back = await offline.bench.client.get(f"/v1/files/{made.json()['id']}/content")
    assert back.content == b"x" * 3_000_000
    assert offline.bench.entry.server.unfinished_bytes == 0
    assert (await offline.bench.infer()).status_code == 200


@pytest.mark.parametrize("expects", [{}, {"expect": "100-continue"}])
async def test_a_body_in_chunks_of_more_than_a_file_may_have_is_refused(
    offline: Offline, expects: dict[str, str]
) -> None:
    await offline.start()

    async def form() -> AsyncIterator[bytes]:
        yield b'--b\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n'
        for _ in range(60):
            yield b"x" * 100_000
        yield b"\r\n--b--\r\n"

    kind = {"content-type": "multipart/form-data; boundary=b", **expects}
    refused = await offline.bench.client.post("/v1/files", content=form(), headers=kind)
    assert (refused.status_code, "may have 4 MiB" in refused.text) == (413, True)
    assert not list((Path(offline.options.path) / "files").iterdir())


async def test_without_a_store_there_are_no_files(offline: Offline) -> None:
    await offline.bench.start(PLAN)
    assert (await offline.bench.client.get("/v1/files")).status_code == 404
    await offline.bench.follow(PLAN, offline=offline.options.model_dump())
    answer = await offline.bench.client.get("/v1/files")
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "2")


async def test_a_client_that_leaves_amid_an_upload_leaves_nothing(offline: Offline) -> None:
    await offline.start()
    _, writer = await asyncio.open_connection("127.0.0.1", offline.bench.port)
    head = "POST /v1/files HTTP/1.1\r\nhost: x\r\ncontent-type: multipart/form-data; boundary=b"
    part = '--b\r\nContent-Disposition: form-data; name="file"; filename="f"'
    writer.write(f"{head}\r\ncontent-length: 999999\r\n\r\n{part}\r\n\r\n".encode())
    await writer.drain()
    writer.close()
    await until(lambda: offline.bench.entry.server.status().connections == 0)
    assert [each.id async for each in offline.client().files.list()] == []
    assert not list((Path(offline.options.path) / "files").iterdir())


async def test_a_full_disk_pauses_batches_and_says_so(offline: Offline, monkeypatch: pytest.MonkeyPatch) -> None:
    await offline.start()
    assert offline.work is not None
    work, client = offline.work, offline.client()
    store, is_full, looks = work.store, True, list[str]()
    record, look = store.record, store.open_batches

    def refuse(*arguments: Any) -> None:
        if is_full:
            raise OSError(28, "No space left on device")
        record(*arguments)

    def watch() -> list[tuple[str, str]]:
        looks.append(work.runner.problem)
        return look()

    monkeypatch.setattr(store, "record", refuse)
    monkeypatch.setattr(work.runner, "full_s", 0.05)
    batch = await begun(client, lines(3))
    await until(lambda: "No space" in work.runner.problem)
    monkeypatch.setattr(store, "open_batches", watch)
    await until(lambda: len(looks) > 2)
    assert all("No space" in problem for problem in looks)  # although looking for batches goes well
    assert "No space" in (await work.status()).problem
    is_full = False
    ended = await over(client, batch)
    assert (ended.status, len(await rows(client, ended.output_file_id)), work.runner.problem) == ("completed", 3, "")


async def test_a_damaged_store_says_so_and_serving_goes_on(offline: Offline) -> None:
    path = Path(offline.options.path)
    path.mkdir()
    (path / "offline.db").write_bytes(b"this is no database, though it is long enough to be one" * 90)
    offline.settings = {"offline": offline.options.model_dump()}
    await offline.bench.start(PLAN, **offline.settings)

    async def find() -> Endpoint:
        return await offline.bench.entry.endpoint("")

    work = offline.work = OfflineWork(offline.options, lambda _name: find)
    work.runner.full_s = 0.05
    await until(lambda: "move it away" in work.runner.problem)
    assert "move it away" in (await work.status()).problem
    assert (await offline.bench.client.get("/v1/files")).status_code == 503
    assert (await offline.bench.infer()).status_code == 200
    (path / "offline.db").rename(path / "damaged.db")
    await until(lambda: not work.runner.problem)
    assert (await offline.bench.client.get("/v1/files")).status_code == 200


async def test_a_folder_that_another_store_has_is_named_until_it_is_free(
    offline: Offline, monkeypatch: pytest.MonkeyPatch
) -> None:
    holds, lock = True, BatchStore.lock
    monkeypatch.setattr(BatchStore, "lock", lambda store: not holds and lock(store))
    starts = asyncio.create_task(offline.start())
    await until(lambda: offline.work is not None and "another process has" in offline.work.runner.problem)
    assert offline.work is not None
    assert offline.options.path in (await offline.work.status()).problem
    answer = await offline.bench.client.get("/v1/files")
    assert (answer.status_code, "status" in answer.text) == (503, True)
    holds = False
    await starts
    ended = await over(offline.client(), await begun(offline.client(), lines(2)))
    assert (ended.status, offline.work.runner.problem) == ("completed", "")


@pytest.mark.parametrize(
    ("url", "asked"),
    [("/v1/completions", {"prompt": "x"}), ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]})],
)
async def test_a_model_that_generates_answers_lines(tmp_path: Path, url: str, asked: dict[str, Any]) -> None:
    bench = test_generation.Bench()
    await bench.start()

    async def find() -> Endpoint:
        return await bench.entry.endpoint("")

    work = OfflineWork(OfflineOptions(path=str(tmp_path / "store")), lambda _name: find)
    await work.follow(read_gateway_config({"plan": test_generation.plan().to_data()}))
    await until(lambda: work.store.is_open)
    rows = (
        {"custom_id": f"r{n}", "method": "POST", "url": url, "body": {"model": "slow", "max_tokens": 3, **asked}}
        for n in range(5)
    )
    text = "".join(json.dumps(row) + "\n" for row in rows)
    batch_id = await work.runner.on_disk(lambda: begun_on_disk(work.store, text, url=url))
    async with asyncio.timeout(PATIENCE_S):
        while (batch := await work.runner.on_disk(batch_of, work.store, batch_id, KEY))["status"] != "completed":
            await asyncio.sleep(0.05)
    answers = [json.loads(line) for line in work.store.path(batch["output_file_id"]).read_text().splitlines()]
    assert sorted(each["custom_id"] for each in answers) == [f"r{n}" for n in range(5)]
    assert {each["response"]["body"]["usage"]["completion_tokens"] for each in answers} == {3}
    status = (await bench.status())["models"]["slow"]
    assert (status["submitted"], status["offline"]["ok"]) == (0, 5)
    await work.close()
    await bench.close()
