"""Send a served system the mistakes of clients, over real sockets, and show the answers. Then look whether they cost
connections, shared memory or requests.

Run with `python lab/benchmarks/walk_bad_inputs.py`: it serves one emulated model on a Ray of its own. The exit code is
1 when an answer is not the one that belongs to the mistake.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Sequence

from bench_served import Row, ours
from serving import BODY, PATH, heading

from tenuto.deployments.serve.endpoint import get_json

_PICTURE = Row("pictures", 1, 1.0, 2.0, 1000.0, (100.0,), "FP32")
_HALF_S = 2.0  # how long a client that went silent is left alone here; the server waits for 10 to 60 s


def _request(body: bytes, *, headers: str = "", path: str = PATH, length: int | None = None) -> bytes:
    length = len(body) if length is None else length
    return f"POST {path} HTTP/1.1\r\nHost: [::1]\r\nContent-Length: {length}\r\n{headers}\r\n".encode() + body


def _tensor(**more: object) -> bytes:
    tensor = {"name": "INPUT0", "shape": [1, 3, 224, 224], "datatype": "FP32", **more}
    return json.dumps({"inputs": [tensor]}).encode()


def _binary(size: int, said: int = 602_112) -> bytes:
    header = _tensor(parameters={"binary_data_size": said})
    return _request(header + bytes(size), headers=f"Inference-Header-Content-Length: {len(header)}\r\n")


_REGION = {"shared_memory_region": "nobody", "shared_memory_byte_size": 602_112}
# What is sent, and the status that belongs to it; 200 is a good request.
CASES: Sequence[tuple[str, bytes, int]] = (
    ("a picture as it should be", _binary(602_112), 200),
    ("JSON that ends too soon", _request(b'{"inputs": ['), 400),
    ("no JSON", _request(b"picture"), 400),
    ("another model's tensor", _request(BODY), 400),
    ("a wrong shape", _request(_tensor(shape=[1, 2], data=[1, 2])), 400),
    ("a wrong type", _request(_tensor(datatype="INT64", data=[1])), 400),
    ("too few numbers", _request(_tensor(data=[1.0, 2.0])), 400),
    ("too little binary data", _binary(1000), 400),
    ("too much binary data", _binary(602_113), 400),
    ("a wrong announcement", _binary(1000, said=1000), 400),
    ("a tensor in shared memory", _request(_tensor(parameters=_REGION)), 400),
    ("a deadline of 0", _binary(602_112).replace(b"Host: [::1]", b"Host: [::1]\r\nX-SLO-Ms: 0", 1), 504),
    (
        "a deadline that is no number",
        _binary(602_112).replace(b"Host: [::1]", b"Host: [::1]\r\nX-SLO-Ms: soon", 1),
        400,
    ),
    ("an unknown model", _request(BODY, path="/v2/models/other/infer"), 404),
    ("a body beyond the limit, announced", _request(b"", length=1 << 30), 413),
    ("headers of 100 kB", b"GET / HTTP/1.1\r\nHost: [::1]\r\nX-Long: " + b"x" * 100_000 + b"\r\n\r\n", 431),
    ("no HTTP", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400),
    ("a wrong length", _request(b"{}").replace(b"Content-Length: 2", b"Content-Length: two"), 400),
    (
        "chunks that are none",
        b"POST %b HTTP/1.1\r\nHost: [::1]\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n" % PATH.encode(),
        400,
    ),
)


def _answer(connection: socket.socket) -> tuple[int, str]:
    """Return status and body of the next answer; status 0 where the connection ended without one."""
    body = b""
    while True:
        while b"\r\n\r\n" not in body:
            more = connection.recv(65536)
            if not more:
                return 0, ""
            body += more
        head, _, body = body.partition(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 1"):  # interim: more comes
            break
    length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
    while len(body) < length and (more := connection.recv(65536)):
        body += more
    return int(head[9:12]), body.decode(errors="replace")


def _ask(port: int, sent: bytes) -> tuple[int, str]:
    with socket.create_connection(("127.0.0.1", port), 10.0) as connection:
        with contextlib.suppress(ConnectionError):  # it was told before all was sent
            connection.sendall(sent)
        return _answer(connection)


def _silent(port: int) -> list[str]:
    """Return what is wrong after clients that went away or silent amid a request."""
    wrong = []
    half = _binary(602_112)[:300_000]
    with socket.create_connection(("127.0.0.1", port), 10.0) as slow:
        slow.sendall(half)
        with socket.create_connection(("127.0.0.1", port)) as left:
            left.sendall(half)
        with socket.create_connection(("127.0.0.1", port)) as closed:
            closed.sendall(_binary(602_112))
            closed.shutdown(socket.SHUT_WR)  # as curl does not, and netcat does
            print(f"  a client that closes its half at once: {_answer(closed)[0] or 'taken for one that has left'}")
        time.sleep(_HALF_S)
        if _ask(port, _binary(602_112))[0] != 200:
            wrong.append("a good request beside a silent client failed")
        slow.sendall(_binary(602_112)[300_000:])  # it goes on
        status = _answer(slow)[0]
        print(f"  a body that pauses for {_HALF_S:g} s: {status}")
        if status != 200:
            wrong.append("the slow client was not answered")
    return wrong


def main() -> None:
    """Send everything, print what is told."""
    heading("what clients get wrong")
    wrong = []
    with ours(_PICTURE, "eager") as (port, _):
        before = get_json(f"http://127.0.0.1:{port}/status")["front_door"]["connections"]
        for what, sent, wanted in CASES:
            status, said = _ask(port, sent)
            said = json.loads(said).get("error", "") if status != 200 else ""
            print(f"  {what}: {status} {said[:110]}")
            if status != wanted:
                wrong.append(f"{what}: {status}, not {wanted}")
        wrong += _silent(port)
        time.sleep(0.5)
        door = get_json(f"http://127.0.0.1:{port}/status")["front_door"]
        print(f"  afterwards: {door}")
        if door["unfinished_bytes"] or door["connections"] > before:
            wrong.append(f"something is kept: {door}")
        if _ask(port, _binary(602_112))[0] != 200:
            wrong.append("a good request failed afterwards")
    print("\n".join([f"NO {each}" for each in wrong] or ["each as it should be, and nothing is lost"]))
    raise SystemExit(1 if wrong else 0)


if __name__ == "__main__":
    main()
