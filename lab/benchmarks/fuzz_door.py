"""Send a gateway random requests over real sockets, and count what becomes of them: framing, bodies, tensors, keys.

    python lab/benchmarks/fuzz_door.py [--requests 100000] [--seed 0] [--together 32] [-o FILE.json]

The gateway is the product's own, in a process of its own with two gpu-lets that answer at once and two keys. Counted
are answers, clear refusals (4xx, 429, 503 and 504 with an `error` in JSON), faults (any other 5xx, answers that are
neither), connections that got no end, how long the gateway's loop stood, and the memory it grew by. The loop beats each
millisecond. Between two beats `turn_ms` is the processor time of its own thread; `stood_ms` the processor time of all
threads of the process, at most the wall time in which the loop did not wait for a core: other threads may hold Python's
lock, other programs do not count. The exit code is 1 where anything is wrong.

Every case closes its half of the connection when it has sent what it has, so that each must come to an end.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gzip
import hashlib
import json
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

_HUNG_S = 40.0  # longer than the server waits for headers; a whole request is answered or refused long before
_TURN_MS = 20.0
_GROWTH_MIB = 16.0  # a leak of 500 bytes a request would be 25 MiB over half of 100,000
_SHOWN = 20
_KEY = {"anna": "key of anna", "ben": "key of ben"}
_REFUSALS = range(400, 500)
_BUSY = (503, 504)
_TENSOR = {"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [1, 2]}


class Case(NamedTuple):
    """What is sent on one connection. `is_whole`: a well-made request that must get an answer."""

    kind: str
    sent: bytes
    is_whole: bool


# --- cases ------------------------------------------------------------------------------------------------------------


def _request(body: bytes, *lines: str, path: str = "/v2/models/m/infer", key: str | None = _KEY["anna"]) -> bytes:
    shown = [f"Authorization: Bearer {key}"] if key is not None else []
    head = "\r\n".join([f"POST {path} HTTP/1.1", "Host: x", f"Content-Length: {len(body)}", *shown, *lines])
    return head.encode("latin-1", "replace") + b"\r\n\r\n" + body


def _absurd(chance: random.Random, depth: int = 0) -> Any:
    """Return any JSON value, most of them unwelcome."""
    plain = [
        None,
        True,
        0,
        -1,
        1e39,
        10**400,
        "9" * 5000,
        "",
        "\ud800",
        "ünïcödé",
        [],
        {},
        1.5,
        "FP32",
        2**63,
        "x" * 300,
    ]
    if depth < 3 and chance.random() < 0.3:
        return [_absurd(chance, depth + 1) for _ in range(chance.randrange(5))]
    if depth < 3 and chance.random() < 0.2:
        return {
            chance.choice(["name", "a", "", "data"]): _absurd(chance, depth + 1) for _ in range(chance.randrange(4))
        }
    return chance.choice(plain)


def _tensor_case(chance: random.Random) -> bytes:
    tensor: dict[str, Any] = dict(_TENSOR)
    for name in chance.sample(["name", "shape", "datatype", "data", "parameters"], chance.randrange(3)):
        tensor[name] = _absurd(chance)
    document: dict[str, Any] = {"inputs": [tensor] * chance.choice([1, 1, 1, 0, 2])}
    for name in chance.sample(["id", "parameters", "outputs", "inputs", "more"], chance.randrange(3)):
        document[name] = _absurd(chance)
    if chance.random() < 0.3:
        names = ["slo_ms", "timeout", "priority", "binary_data_output", "binary_data_size", "shared_memory_region"]
        document["parameters"] = {chance.choice(names): _absurd(chance)}
    return _request(json.dumps(document).encode("utf-8", "surrogatepass"))


def _binary_case(chance: random.Random) -> bytes:
    said, held = chance.choice([8] * 9 + [0, 7, 9, -1, 2**40]), chance.choice([8] * 9 + [0, 7, 9, 4096])
    tensor = {**_TENSOR, "parameters": {"binary_data_size": said}}
    del tensor["data"]
    text = json.dumps({"inputs": [tensor]}).encode()
    length = chance.choice([len(text)] * 9 + [0, -1, len(text) + 1, 10**12, "many", " 12", f"{len(text)} "])
    return _request(text + chance.randbytes(held), f"Inference-Header-Content-Length: {length}")


def _body_case(chance: random.Random) -> bytes:
    good = json.dumps({"inputs": [_TENSOR]}).encode()
    body, lines = chance.choice(
        [
            (lambda: (chance.randbytes(chance.randrange(3000)), ())),
            (lambda: (good[: chance.randrange(len(good))], ())),
            (lambda: (b"[" * chance.randrange(1, 200_000), ())),
            (lambda: (b'{"inputs":' + b"[" * chance.randrange(100) + b"1" * chance.randrange(100_000), ())),
            (lambda: (gzip.compress(good), ("Content-Encoding: gzip",))),
            (lambda: (gzip.compress(good)[: chance.randrange(40)], ("Content-Encoding: gzip",))),
            (lambda: (gzip.compress(bytes(chance.randrange(10 << 20)), 1), ("Content-Encoding: gzip",))),
            (lambda: (gzip.compress(b"[" + b"1," * chance.randrange(1 << 20) + b"1]", 1), ("Content-Encoding: gzip",))),
            (lambda: (good, (f"Content-Encoding: {chance.choice(['br', 'zstd', 'gzip, gzip', '', 'identity'])}",))),
            (lambda: (json.dumps({"inputs": [{**_TENSOR, "data": [1.5] * chance.randrange(200_000)}]}).encode(), ())),
            (lambda: (bytes(chance.randrange(1 << 22)), ())),
        ]
    )()
    return _request(body, *lines, path=chance.choice(["/v2/models/m/infer", "/predict/m"]))


def _chunks(chance: random.Random) -> bytes:
    parts = []
    for _ in range(chance.randrange(6)):
        data = chance.randbytes(chance.randrange(1, 300))
        size = chance.choice(
            [f"{len(data):x}", f"{len(data):x}", f"{len(data):X}", f"0{len(data):x}", "zz", "-1", "f" * 17]
        )
        extension = chance.choice(["", "", ";a=b", ';a="\\""', ";" + "x" * chance.randrange(5000), " ", "\t;"])
        parts.append(f"{size}{extension}".encode() + chance.choice([b"\r\n", b"\r\n", b"\n"]) + data + b"\r\n")
    trailer = chance.choice(
        [b"", b"", b"a: b\r\n", b"Content-Length: 5\r\n", b"x" * chance.randrange(9000) + b": 1\r\n"]
    )
    return b"".join(parts) + chance.choice([b"0\r\n", b"0\r\n", b"", b"00\r\n"]) + trailer + b"\r\n"


def _framing_case(chance: random.Random) -> bytes:
    def mostly(good: str, bad: list[str]) -> str:
        return good if chance.random() < 0.9 else chance.choice(bad)

    body = json.dumps({"inputs": [_TENSOR]}).encode()
    size = len(body)
    method = mostly("POST", ["GET", "PUT", "HEAD", "OPTIONS", "CONNECT", "TRACE", "BREW", "post", "PO ST", ""])
    path = mostly("/v2/models/m/infer", ["/v2", "*", "http://x/v2", "//", "/%2e%2e/v2", "/v2#a", "\x00", "x"])
    version = mostly("HTTP/1.1", ["HTTP/1.0", "HTTP/0.9", "HTTP/2.0", "HTTP/1.2", "http/1.1", "HTTP/1.1 "])
    lengths = [
        f"{size} ",
        f"{size}\t",
        f"0{size}",
        "0" * 20 + str(size),
        f"+{size}",
        f"{size},{size}",
        "",
        str(size + 9),
    ]
    lines = [f"Host: {mostly('x', ['', 'a b', 'x:80', 'x, y', '[::1]:8000'])}", f"Authorization: Bearer {_KEY['anna']}"]
    if chance.random() < 0.5:
        lines.append(f"Content-Length: {mostly(str(size), lengths)}")
    if chance.random() < 0.05:
        lines.append(f"Content-Length: {mostly(str(size), lengths)}")
    if len(lines) == 2 or chance.random() < 0.05:
        kinds = ["Chunked", "chunked ", "identity", "gzip, chunked", "chunked, chunked", "xchunked", ""]
        lines.append(f"Transfer-Encoding: {mostly('chunked', kinds)}")
        body = f"{size:x}\r\n".encode() + body + b"\r\n0\r\n\r\n" if chance.random() < 0.5 else _chunks(chance)
    extra = ["Connection: close", "Connection: keep-alive, x", "Expect: 100-continue", "Upgrade: h2c", "X: a", "A-B: c"]
    bad = [" folded", "no colon", "A b: c", "X:\x00", "\x7f: 1", "Host: second", "Transfer-Encoding : chunked"]
    lines += chance.sample(extra, chance.choice([0, 0, 1, 2]))
    lines += [mostly("X-Id: 1", [*bad, "X: " + "y" * chance.randrange(20_000)])]
    chance.shuffle(lines)
    end = mostly("\r\n", ["\n", "\r"])
    head = f"{method} {path} {version}{end}" + "".join(f"{line}{end}" for line in lines) + end
    if method == "HEAD":
        return head.encode("latin-1", "replace")
    return (head.encode("latin-1", "replace") + body) * chance.choice([1, 1, 1, 3])


def _noise_case(chance: random.Random) -> bytes:
    """A good request with some bytes changed, left out or doubled."""
    sent = bytearray(_request(json.dumps({"inputs": [_TENSOR]}).encode()))
    for _ in range(chance.randrange(1, 6)):
        place = chance.randrange(len(sent))
        kind = chance.randrange(3)
        if kind == 0:
            sent[place] = chance.randrange(256)
        elif kind == 1:
            del sent[place : place + chance.randrange(1, 9)]
        else:
            sent[place:place] = sent[place : place + chance.randrange(1, 40)]
        if not sent:
            break
    return bytes(sent)


def _key_case(chance: random.Random) -> bytes:
    body = json.dumps({"inputs": [_TENSOR]}).encode()
    both = [f"X-Api-Key: {_KEY['ben']}", f"Authorization: Bearer {_KEY['anna']}"]
    unknown = ["X-Api-Key: " + "x" * chance.randrange(9000), f"Authorization: Bearer {chance.randbytes(20).hex()}"]
    single = ["Authorization: Bearer ", "Authorization: Basic a2V5", "X-Api-Key: \xff\xfe", *unknown, *both]
    given = chance.choice([[], both, *([each] for each in single)])
    paths = ["/v2/models/m/infer", "/v2/models/n/infer", "/v2/models/%6d/infer", "/v2%2Fmodels/m/infer", "/predict/n"]
    paths += [
        "/v2/models/m/versions/1/infer",
        "/v2/models/../n/infer",
        "/v2/models//infer",
        "/status",
        "/v2/models/\xff/infer",
    ]
    return _request(body, *given, path=chance.choice(paths), key=None)


def _good_case(chance: random.Random) -> bytes:
    if chance.random() < 0.5:
        return _request(json.dumps({"inputs": [_TENSOR]}).encode())
    tensor = {key: value for key, value in _TENSOR.items() if key != "data"}
    text = json.dumps({"inputs": [{**tensor, "parameters": {"binary_data_size": 8}}]}).encode()
    return _request(text + bytes(8), f"Inference-Header-Content-Length: {len(text)}")


KINDS: dict[str, tuple[int, Callable[[random.Random], bytes]]] = {
    "good": (10, _good_case),
    "framing": (30, _framing_case),
    "noise": (15, _noise_case),
    "body": (10, _body_case),
    "tensor": (20, _tensor_case),
    "binary": (8, _binary_case),
    "key": (7, _key_case),
}
_ANSWERED = ("good", "body", "tensor", "key")  # well framed: each is owed an answer


def cases(seed: int, count: int) -> Iterator[Case]:
    """Yield the cases of a seed; each can be made again from its number."""
    names = list(KINDS)
    for number in range(count):
        chance = random.Random(f"{seed} {number}")
        (kind,) = chance.choices(names, [KINDS[name][0] for name in names])
        yield Case(kind, KINDS[kind][1](chance), kind in _ANSWERED)


# --- the client -------------------------------------------------------------------------------------------------------


def verdict_of(case: Case, answer: bytes, *, is_ended: bool) -> str:
    """Return what became of a case, in one word or two; what begins with `!` is wrong."""
    if not is_ended:
        return "!hung"
    if not answer:
        return "!no answer" if case.is_whole else "closed"
    last = ""
    rest = answer
    while rest:
        head, found, rest = rest.partition(b"\r\n\r\n")
        line = head.split(b"\r\n", 1)[0].split(b" ")
        if not found or len(line) < 2 or not head.startswith(b"HTTP/1.1 ") or not line[1].isdigit():
            return "!no HTTP"
        status = int(line[1])
        if status < 200:
            continue
        fields = {name.strip().lower(): value.strip() for name, _, value in map(_field, head.split(b"\r\n")[1:])}
        length = int(fields.get(b"content-length", b"0"))
        if case.sent.startswith(b"HEAD") and (not rest or rest.startswith(b"HTTP/1.1 ")):
            length = 0
        body, rest = rest[:length], rest[length:]
        if len(body) < length:
            return "!cut answer"
        if 200 <= status < 400:
            last = last or "answered"
        elif status in _REFUSALS or status in _BUSY:
            if length and not _is_clear(body):
                return f"!unclear {status}"
            last = last or f"refused {status}"
        else:
            return f"!fault {status}"
    if case.kind == "good" and last != "answered":
        return f"!good, but {last}"
    return last or ("!no answer" if case.is_whole else "closed")


def _field(line: bytes) -> tuple[bytes, bytes, bytes]:
    return line.partition(b":")


def _is_clear(body: bytes) -> bool:
    try:
        found = json.loads(body)
    except ValueError:
        return False
    return isinstance(found, dict) and isinstance(found.get("error"), str) and bool(found["error"])


async def send(port: int, case: Case, number: int) -> tuple[str, bytes]:
    """Send one case on a connection of its own, from one of a thousand addresses of this machine."""
    source = (f"127.{1 + number % 250}.{number // 250 % 4}.1", 0)
    reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=source, limit=1 << 26)
    answer = bytearray()

    async def read() -> None:
        while data := await reader.read(1 << 16):
            answer.extend(data)

    try:
        reading = asyncio.ensure_future(read())
        writer.write(case.sent)
        with contextlib.suppress(OSError):
            await asyncio.wait_for(writer.drain(), _HUNG_S)
            if case.is_whole:  # a client that has closed its half may be taken for one that has left
                await _until_answered(answer, reading)
            writer.write_eof()
        is_ended = True
        try:
            await asyncio.wait_for(reading, _HUNG_S)
        except TimeoutError:
            is_ended = False
        except OSError:  # reset, as what was sent beyond a refusal was not read
            pass
    finally:
        writer.close()
    return verdict_of(case, bytes(answer), is_ended=is_ended), bytes(answer)


async def _until_answered(answer: bytearray, reading: asyncio.Future[None]) -> None:
    until = time.monotonic() + _HUNG_S
    while not reading.done() and time.monotonic() < until:
        head, found, _ = bytes(answer[:20_000]).partition(b"\r\n\r\n")
        if found:
            length = head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0].strip() or b"0"
            if len(answer) >= len(head) + 4 + int(length):
                return
        await asyncio.sleep(0.002)


async def fuzz(
    port: int, seed: int, count: int, together: int, figures: Callable[[], dict[str, Any]]
) -> dict[str, Any]:
    """Send all cases and return what became of them."""
    seen: Counter[str] = Counter()
    by_kind: dict[str, Counter[str]] = {kind: Counter() for kind in KINDS}
    wrong: list[dict[str, Any]] = []
    memory: list[float] = []
    numbered = enumerate(cases(seed, count))
    every = max(1, count // 20)

    async def work() -> None:
        for number, case in numbered:
            try:
                word, answer = await send(port, case, number)
            except OSError as error:
                word, answer = f"!no connection ({error.strerror})", b""
            seen[word] += 1
            by_kind[case.kind][word] += 1
            if word.startswith("!") and len(wrong) < _SHOWN:
                wrong.append(
                    {
                        "case": number,
                        "kind": case.kind,
                        "what": word,
                        "sent": repr(case.sent[:600]),
                        "answer": repr(answer[:300]),
                    }
                )
            if (number + 1) % every == 0:
                now = await asyncio.to_thread(figures)
                memory.append(now["memory_mib"])
                print(
                    f"{number + 1} sent, {sum(n for w, n in seen.items() if w[0] == '!')} wrong, {now}",
                    file=sys.stderr,
                    flush=True,
                )

    await asyncio.gather(*(work() for _ in range(together)))
    await asyncio.sleep(2.0)
    last = await asyncio.to_thread(figures)
    early, late = memory[len(memory) // 4 : len(memory) // 2], memory[3 * len(memory) // 4 :]
    return {
        "seed": seed,
        "requests": count,
        "seen": dict(sorted(seen.items())),
        "by_kind": {kind: dict(sorted(counts.items())) for kind, counts in by_kind.items()},
        "wrong": wrong,
        "wrong_count": sum(number for word, number in seen.items() if word.startswith("!")),
        "memory_mib": memory,
        # Bodies under way come and go, so that the least of the second and of the last quarter are compared.
        "memory_growth_mib": round(min(late, default=0.0) - min(early, default=0.0), 1),
        "server": last,
    }


# --- the server -------------------------------------------------------------------------------------------------------


def serve(port: int) -> None:
    """Run a gateway until the standard input ends; each line on it asks for figures."""
    import uvloop

    from tenuto.deployments.entry.gateway import Entry
    from tenuto.deployments.process.own_loop import spare_the_collector
    from tenuto.deployments.serve.user_config import read_gateway_config
    from tests.instruments.fake_gpulet import FakeGpulet, finder, make_plan

    plan = make_plan(("a", ("m",)), ("b", ("n",)), slo_ms=60_000.0)
    gpulets = {"a": FakeGpulet("a", ("m",)), "b": FakeGpulet("b", ("n",))}
    hashes = [{"name": name, "sha256": hashlib.sha256(key.encode()).hexdigest()} for name, key in _KEY.items()]
    hashes[1]["models"] = ["n"]  # type: ignore[assignment]
    beside = asyncio.new_event_loop()
    threading.Thread(target=beside.run_forever, daemon=True).start()
    for gpulet in gpulets.values():
        asyncio.run_coroutine_threadsafe(gpulet.start(), beside).result()
    loop = uvloop.new_event_loop()
    longest = {"turn_ms": 0.0, "stood_ms": 0.0, "stood_wall_ms": 0.0, "over": 0}
    last: list[float] = []

    def beat() -> None:
        waited_ns = int(Path("/proc/thread-self/schedstat").read_text().split()[1])
        clocks = [time.thread_time(), time.process_time(), time.monotonic(), waited_ns / 1e9]
        if last:
            own, all_threads, wall, waited = (1000.0 * (now - before) for now, before in zip(clocks, last, strict=True))
            stood = max(own, min(all_threads, wall - waited))
            for name, value in (("turn_ms", own), ("stood_ms", stood), ("stood_wall_ms", wall)):
                longest[name] = max(longest[name], value)
            longest["over"] += stood > _TURN_MS
        last[:] = clocks
        loop.call_later(0.001, beat)

    async def begin() -> Entry:
        entry = Entry(finder(gpulets))
        config = {"plan": plan.to_data(), "scheduler": {"name": "eager"}, "keys": hashes}
        await entry.follow(read_gateway_config({**config, "listen": {"host": "127.0.0.1", "port": port}}))
        while not entry.service.dispatching.is_ready():
            await asyncio.sleep(0.01)
        spare_the_collector()
        loop.call_later(0.1, beat)
        return entry

    threading.Thread(target=loop.run_forever, daemon=True).start()
    entry = asyncio.run_coroutine_threadsafe(begin(), loop).result()
    print("ready", flush=True)
    for _ in sys.stdin:
        for gpulet in gpulets.values():  # they keep what they were asked, for tests
            for kept in (gpulet.sizes, gpulet.messages, gpulet.bodies):
                kept.clear()
        said = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        found = {
            **{name: round(value, 1) for name, value in longest.items()},
            "memory_mib": round(int(said["RssAnon"].split()[0]) / 1024, 1),
            "shared_mib": round(int(said["RssShmem"].split()[0]) / 1024, 1),  # slots for bodies, which are kept
            "unfinished_bytes": entry.server.status().unfinished_bytes,
            "connections": entry.server.status().connections,
        }
        print(json.dumps(found), flush=True)


def main() -> None:
    """Fuzz, print the result, and end with 1 where something is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--together", type=int, default=32, help="connections at a time")
    parser.add_argument("--case", type=int, help="print what this case of the seed sends, and nothing else")
    parser.add_argument("--serve", type=int, metavar="PORT", help=argparse.SUPPRESS)
    parser.add_argument("-o", "--output", metavar="FILE", help="write the result there as well")
    args = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parents[2]))
    if args.serve is not None:
        serve(args.serve)
        return
    if args.case is not None:
        *_, case = cases(args.seed, args.case + 1)
        sys.stdout.buffer.write(case.sent)
        return
    from tenuto.deployments.serve.launcher import unused_port

    port = unused_port()
    command = [sys.executable, __file__, "--serve", str(port)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        assert server.stdout.readline() == "ready\n"
        lock = threading.Lock()

        def figures() -> dict[str, Any]:
            with lock:
                print(file=server.stdin, flush=True)
                found: dict[str, Any] = json.loads(server.stdout.readline())  # type: ignore[union-attr]
            return found

        began_at = time.monotonic()
        try:
            result = asyncio.run(fuzz(port, args.seed, args.requests, args.together, figures))
        finally:
            server.stdin.close()
    result["seconds"] = round(time.monotonic() - began_at, 1)
    last = result["server"]
    faults = [f"{result['wrong_count']} cases went wrong"] if result["wrong_count"] else []
    faults += [f"the loop stood for {last['stood_ms']} ms, {last['over']} times too long"] if last["over"] else []
    grown = result["memory_growth_mib"]
    faults += [f"memory grew by {grown} MiB"] if grown > _GROWTH_MIB else []
    faults += ["bodies are kept"] if last["unfinished_bytes"] else []
    faults += [f"{last['connections']} connections are kept"] if last["connections"] else []
    result["faults"] = faults
    text = json.dumps(result, indent=1)
    print(text)
    if args.output:
        Path(args.output).write_text(text, encoding="utf-8")
    raise SystemExit(1 if faults else 0)


if __name__ == "__main__":
    main()
