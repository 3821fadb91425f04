"""Send a gateway random requests over real sockets, and count the answers: framing, bodies, tensors, keys, gRPC.

    python lab/benchmarks/fuzz_door.py [--requests 100000] [--seed 0] [--together 32] [-o FILE.json]

The gateway is the product's own and runs in a process of its own. It has two gpu-lets that answer at once, a gpu-let in
another process that generates on an emulated GPU, and two keys. Some clients of streams leave in the middle. Every case
closes its half of the connection after its last byte, so every connection must end. Conversations of HTTP/2 are made up
as in tests/deployments/entry/test_http2_differential.py; no request may be answered that h2 does not read in them.

Counted are answers; clear refusals (4xx, 429, 503 and 504 with an `error` in JSON; over gRPC a status with a message);
faults (any other 5xx, gRPC's INTERNAL and UNKNOWN, and answers that are neither); connections that did not end; memory
of sequences that is still held at the end; how long the gateway's loop stood; and by how much its memory grew. The loop
beats each millisecond. Between two beats, `turn_ms` is the processor time of its own thread. `stood_ms` is the
processor time of all threads of the process, because they may hold Python's lock; it is at most the wall time in which
the loop did not wait for a core, so other programs do not count. The exit code is 1 when anything is wrong. SIGTERM
ends it early, with what it has by then.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import gc
import gzip
import hashlib
import itertools
import json
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

_HUNG_S = 240.0  # longer than a generation waits for its turn (60 s) and then takes for all the tokens that fit
_TURN_MS = 20.0
# Four caches of 1,024 heads fill while a run goes on. Each head has at most 2 KiB, as it came and as it was read. A
# leak of 500 bytes a request would be 25 MiB over half of 100,000.
_GROWTH_MIB = 16.0
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
    leaves_at: int = 0  # bytes of the answer after which the client leaves; 0: it stays


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


_GENERATION = {"model": "w", "prompt": [1, 2, 3], "max_tokens": 4}
_CHAT = {"model": "w", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
_GENERATE = {"text_input": "hi", "parameters": {"max_tokens": 4}}
_GENERATIONS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/v1/completions", _GENERATION),
    ("/v1/chat/completions", _CHAT),
    ("/v2/models/w/generate", _GENERATE),
    ("/v2/models/w/generate_stream", _GENERATE),
)
_FIELDS = [
    *("model", "prompt", "messages", "text_input", "parameters", "max_tokens", "max_completion_tokens", "temperature"),
    *(
        "top_p",
        "seed",
        "stop",
        "stream",
        "stream_options",
        "n",
        "best_of",
        "echo",
        "logprobs",
        "top_logprobs",
        "suffix",
    ),
    *("presence_penalty", "logit_bias", "user", "response_format", "top_k", "tools", "id", "more"),
]


def _steered(chance: random.Random) -> Any:
    """Return a value that a field of a generation may have, or nearly."""
    size = chance.choice([1, 2, 17, 300, 5000, 100_000])
    return chance.choice(
        [
            lambda: [1] * size,
            lambda: [chance.choice([-1, 2**31, 2**63, 2**64, 10**400, 1.5, "1", None, [1], True])] * min(size, 300),
            lambda: "x" * size,
            lambda: ["x" * chance.choice([0, 1, 2000])] * min(size, 300),
            lambda: ["a"] * size,
            lambda: {str(number): 1.0 for number in range(min(size, 5000))},
            lambda: [{"role": "user", "content": "x"}] * min(size, 5000),
            lambda: [{"role": "user", "content": [{"type": "text", "text": "x"}], "more": _absurd(chance)}],
            lambda: {"include_usage": chance.choice([True, False, None, 1]), "more": 1},
            lambda: chance.choice([0, 1, 2, 16, 5000, 2**31 - 1, 2**31, 2**63, 2**64, -1, 1e308]),
            lambda: _absurd(chance),
        ]
    )()


def _generation_case(chance: random.Random) -> bytes:
    path, document = chance.choice(_GENERATIONS)
    document = {**document, **({"stream": True} if path.startswith("/v1") and chance.random() < 0.5 else {})}
    for name in chance.sample(_FIELDS, chance.choice([0, 1, 1, 2, 3])):
        document[name] = _steered(chance)
    body = json.dumps(document).encode("utf-8", "surrogatepass")
    kind = chance.random()
    if kind < 0.1:
        depth = chance.choice([10, 1000, 100_000])
        nested = b'"more":' + chance.choice([b"[" * depth + b"]" * depth, b'{"a":' * depth + b"1" + b"}" * depth])
        inside = b'{"model":"w","messages":[{"role":"user","content":"x",' + nested + b"}]}"
        body = chance.choice([body[:-1] + b"," + nested + b"}", inside])
    elif kind < 0.15:
        body = body[: chance.randrange(len(body))]
    elif kind < 0.2:
        place = chance.randrange(len(body))
        body = body[:place] + chance.randbytes(chance.randrange(1, 9)) + body[place + 1 :]
    lines = [f"X-SLO-Ms: {chance.choice(['0', '1', '3600000', '1e9', 'nan', 'x'])}"] if chance.random() < 0.1 else []
    if chance.random() < 0.05:
        body, lines = gzip.compress(body, mtime=0), [*lines, "Content-Encoding: gzip"]
    key = chance.choice([_KEY["anna"]] * 20 + [_KEY["ben"], None, "x"])
    return _request(body, *lines, path=path, key=key)


def _stream_case(chance: random.Random) -> bytes:
    """A stream as it should be."""
    path, document = chance.choice([each for each in _GENERATIONS if each[0] != "/v2/models/w/generate"])
    most = chance.choice([1, 5, 50, 200])
    if path.startswith("/v1"):
        document = {**document, "stream": True, "max_tokens": most}
    else:
        document = {**document, "parameters": {"max_tokens": most}}
    return _request(json.dumps(document).encode(), path=path)


def _message(name: str) -> bytes:
    """Return a good request of gRPC, as a call has it."""
    from tenuto.deployments.entry.protocols.grpc_messages import InferRequest

    asked = InferRequest(model_name="m", id=name, raw_input_contents=[bytes(8)])
    asked.inputs.add(name="x", datatype="FP32", shape=[1, 2])
    return _prefixed(asked.SerializeToString())


def _prefixed(data: bytes, flag: int = 0) -> bytes:
    return bytes((flag,)) + len(data).to_bytes(4, "big") + data


def _conversation_case(chance: random.Random) -> bytes:
    from tests.deployments.entry.test_http2_differential import made_up

    return made_up(chance, (b"x-api-key", _KEY["anna"].encode()), message=_message)


def _call_case(chance: random.Random) -> bytes:
    """One call, whose frames are as they should be; its metadata and its messages need not be."""
    from tenuto.deployments.entry.protocols.grpc_messages import MANAGEMENT, SERVICE, InferRequest
    from tests.instruments import http2_frames as http2

    paths = [f"{SERVICE}/ModelInfer", f"{SERVICE}/ModelStreamInfer"] * 6
    paths += [f"{SERVICE}/{name}" for name in MANAGEMENT] + ["no.Such/Call", "x/../y"]
    paths += ["grpc.health.v1.Health/Check", "grpc.health.v1.Health/Watch"]
    paths += ["grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"]
    sent = []
    for _ in range(chance.choice([0, 1, 1, 1, 1, 1, 2, 20])):
        model = chance.choice(["m"] * 6 + ["w"] * 3 + ["n", "", "x" * 9000, "m/../n", "ü"])
        asked = InferRequest(model_name=model, id=chance.choice(["", "1", "x" * 300]))
        for _ in range(chance.choice([1, 1, 1, 1, 0, 2])):
            shape = chance.choice([[1, 2], [1, 2], [1, 2], [], [2], [-1, 2], [2**62, 4], [0, 2], [1] * 3000, [1]])
            kind = chance.choice(["FP32"] * 4 + ["BYTES", "BYTES", "UINT8", "", "FP99"])
            tensor = asked.inputs.add(name=chance.choice(["x", "text_input", "y"]), datatype=kind, shape=shape)
            match chance.randrange(4):
                case 0:
                    tensor.contents.fp32_contents.extend([1.0] * chance.choice([2, 2, 0, 3, 20_000]))
                case 1:
                    tensor.contents.bytes_contents.append(chance.randbytes(chance.choice([0, 3, 300])))
                case _:
                    asked.raw_input_contents.append(bytes(chance.choice([8, 8, 8, 0, 7, 9, 1 << 16])))
        if model == "w" and chance.random() < 0.7:
            asked = InferRequest(model_name="w")
            asked.inputs.add(name="text_input", datatype="BYTES", shape=[1]).contents.bytes_contents.append(b"hi")
            asked.parameters["max_tokens"].int64_param = chance.choice([1, 4, 50, 0, -1, 2**40])
        if chance.random() < 0.2:
            name = chance.choice(["timeout", "priority", "slo_ms", "temperature", "stop", "seed", "stream", "x"])
            if chance.random() < 0.5:
                asked.parameters[name].string_param = chance.choice(["", "1", "nan", "x" * 300])
            else:
                asked.parameters[name].int64_param = chance.choice([0, 1, -1, 2**62])
        data = asked.SerializeToString()
        if chance.random() < 0.15:
            data = chance.choice([data[: len(data) // 2], chance.randbytes(chance.randrange(300)), b"", data + b"\xff"])
        sent.append(_prefixed(data, chance.choice([0] * 30 + [1, 2])))
    said = {":method": "POST", ":scheme": "http", ":path": f"/{chance.choice(paths)}", ":authority": "x"}
    said |= {"te": "trailers", "content-type": "application/grpc"}
    keys = [_KEY["anna"]] * 12 + [_KEY["ben"], "", "x", "x" * 9000]
    said["x-api-key"] = chance.choice(keys)
    for name, values in {
        "grpc-timeout": ["10S", "1m", "0n", "999999999S", "x"],
        "grpc-encoding": ["identity", "gzip", "x"],
        "content-type": ["application/grpc+proto", "application/json", ""],
        ":method": ["GET", "OPTIONS"],
        "x-slo-ms": ["1", "nan", "1e9"],
    }.items():
        if chance.random() < 0.05:
            said[name] = chance.choice(values)
    block = b"".join(http2.literal(name.encode(), value.encode()) for name, value in said.items())
    body = b"".join(sent)
    frames = [http2.frame(http2.DATA, 0, 1, body[at : at + 9000]) for at in range(0, len(body), 9000)]
    begun = http2.PREFACE + http2.frame(http2.SETTINGS, 0, 0) + http2.frame(http2.HEADERS, 4, 1, block)
    return begun + b"".join(frames) + http2.frame(http2.DATA, 1, 1)


KINDS: dict[str, tuple[int, Callable[[random.Random], bytes]]] = {
    "good": (10, _good_case),
    "framing": (30, _framing_case),
    "noise": (15, _noise_case),
    "body": (10, _body_case),
    "tensor": (20, _tensor_case),
    "binary": (8, _binary_case),
    "key": (7, _key_case),
    "generation": (15, _generation_case),
    "stream": (4, _stream_case),
    "left stream": (4, _stream_case),
    "conversation": (15, _conversation_case),
    "call": (15, _call_case),
}
_OVER_GRPC = ("conversation", "call")
_ANSWERED = ("good", "body", "tensor", "key", "generation", "stream")  # well framed: each is owed an answer


def cases(seed: int, count: int, first: int = 0) -> Iterator[Case]:
    """Yield the cases of a seed from `first` on; each can be made again from its number."""
    names = list(KINDS)
    for number in range(first, count):
        chance = random.Random(f"{seed} {number}")
        (kind,) = chance.choices(names, [KINDS[name][0] for name in names])
        sent = KINDS[kind][1](chance)
        yield Case(kind, sent, kind in _ANSWERED, chance.randrange(1, 3000) if kind == "left stream" else 0)


# --- the client -------------------------------------------------------------------------------------------------------


def verdict_of(case: Case, answer: bytes, *, is_ended: bool) -> str:
    """Return what became of a case, in one word or two; what begins with `!` is wrong."""
    if not is_ended:
        return "!hung"
    if not answer:
        return "!no answer" if case.is_whole else "closed"
    if case.kind in _OVER_GRPC:
        return _verdict_of_frames(case, answer)
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
        if fields.get(b"transfer-encoding") == b"chunked":
            events, rest = _unchunked(rest)
            if events is None:
                return "closed" if case.leaves_at else "!cut answer"
            if b'"error"' in events and case.kind != "stream":
                last = last or "refused amid the stream"
            elif not events.startswith(b"data: ") or b'"error"' in events:
                return "!no events"
            last = last or "answered"
            continue
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


def frames_of(answer: bytes) -> Iterator[tuple[int, int, int, bytes]]:
    """Yield kind, flags, stream and payload of whole frames."""
    while len(answer) >= 9 and len(answer) >= 9 + (size := int.from_bytes(answer[:3], "big")):
        yield answer[3], answer[4], int.from_bytes(answer[5:9], "big"), answer[9 : 9 + size]
        answer = answer[9 + size :]


def _verdict_of_frames(case: Case, answer: bytes) -> str:
    from hpack import Decoder

    from tenuto.deployments.entry.protocols.grpc_messages import InferResponse
    from tests.deployments.entry.test_http2_differential import InvalidBodyLengthError, theirs
    from tests.instruments import http2_frames as http2

    bodies: dict[int, bytes] = {}
    others: set[int] = set()
    word, decoder = "", Decoder()
    decoder.max_allowed_table_size = 1 << 32  # a case may have allowed as much
    for kind, flags, stream, payload in frames_of(answer):
        if kind == http2.DATA:
            bodies[stream] = bodies.get(stream, b"") + payload
        elif kind == http2.HEADERS:
            said = dict(decoder.decode(payload, raw=True))
            status = said.get(b"grpc-status")
            if said.get(b":status") == b"415":
                others.add(stream)  # not gRPC; the status behind it is for who reads no other
            if status in (b"2", b"13") and stream not in others:
                return f"!fault {said!r}"
            if flags & 1 and status is None:
                return "!no status"
            if status not in (None, b"0"):
                if not said.get(b"grpc-message"):
                    return f"!unclear {said!r}"
                word = word or f"refused by gRPC {status.decode()}"
            elif status is not None:
                word = "answered"
        elif kind == http2.GOAWAY and payload[4:8] != bytes(4):
            word = word or "refused by HTTP/2"
    if case.kind == "call":
        return word or "!no answer"
    whole = [body[5:] for body in bodies.values() if len(body) == 5 + int.from_bytes(body[1:5], "big")]
    told = {InferResponse.FromString(body).id for body in whole}
    with contextlib.suppress(InvalidBodyLengthError):  # of a call that may be over here
        if not told <= theirs(case.sent)[0]:
            return "!answered what h2 refuses"
    return word or "closed"


def _unchunked(data: bytes) -> tuple[bytes | None, bytes]:
    """Return a body that came in chunks, None where it is cut, and what follows it."""
    parts = []
    while True:
        size, found, data = data.partition(b"\r\n")
        if not found or len(data) < int(size, 16) + 2:
            return None, b""
        part, data = data[: int(size, 16)], data[int(size, 16) + 2 :]
        if not part:
            return b"".join(parts), data
        parts.append(part)


def _field(line: bytes) -> tuple[bytes, bytes, bytes]:
    return line.partition(b":")


def _is_clear(body: bytes) -> bool:
    try:
        found = json.loads(body)
    except ValueError:
        return False
    error = found.get("error") if isinstance(found, dict) else None
    if isinstance(error, dict):  # OpenAI's form
        error = error.get("message")
    return isinstance(error, str) and bool(error)


async def send(port: int, case: Case, number: int) -> tuple[str, bytes]:
    """Send one case on a connection of its own, from one of a thousand addresses of this machine."""
    source = (f"127.{1 + number % 250}.{number // 250 % 4}.1", 0)
    reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=source, limit=1 << 26)
    answer = bytearray()

    async def read() -> None:
        while data := await reader.read(1 << 16):
            answer.extend(data)
            if case.leaves_at and len(answer) >= case.leaves_at:
                writer.transport.abort()
                return

    try:
        reading = asyncio.ensure_future(read())
        writer.write(case.sent)
        with contextlib.suppress(OSError):
            await asyncio.wait_for(writer.drain(), _HUNG_S)
            if case.kind in _OVER_GRPC:
                await _until_quiet(answer, reading, is_one=case.kind == "call")
            elif (
                case.is_whole or case.leaves_at
            ):  # a client that has closed its half may be taken for one that has left
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
        if found and b"transfer-encoding: chunked" in head:
            if answer.endswith(b"0\r\n\r\n"):
                return
        elif found:
            length = head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0].strip() or b"0"
            if len(answer) >= len(head) + 4 + int(length):
                return
        await asyncio.sleep(0.002)


async def _until_quiet(answer: bytearray, reading: asyncio.Future[None], *, is_one: bool) -> None:
    """Wait for the end of the one call, or until nothing more comes."""
    until, came, quiet = time.monotonic() + _HUNG_S, -1, 0
    while not reading.done() and time.monotonic() < until and (is_one or quiet < 10):
        quiet = quiet + 1 if len(answer) == came else 0
        if is_one and not quiet and any(kind == 1 and flags & 1 for kind, flags, _, _ in frames_of(bytes(answer))):
            return
        came = len(answer)
        await asyncio.sleep(0.005)


async def fuzz(
    port: int, grpc_port: int, seed: int, first: int, count: int, together: int, figures: Callable[[], dict[str, Any]]
) -> dict[str, Any]:
    """Send all cases and return what became of them."""
    seen: Counter[str] = Counter()
    by_kind: dict[str, Counter[str]] = {kind: Counter() for kind in KINDS}
    wrong: list[dict[str, Any]] = []
    memory: list[float] = []
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    numbered = enumerate(itertools.takewhile(lambda _: not stopped.is_set(), cases(seed, count, first)), first)
    every = max(1, (count - first) // 20)

    async def work() -> None:
        for number, case in numbered:
            try:
                word, answer = await send(grpc_port if case.kind in _OVER_GRPC else port, case, number)
            except OSError as error:
                word, answer = f"!no connection ({error.strerror})", b""
            seen[word] += 1
            by_kind[case.kind][word] += 1
            if word.startswith("!"):
                print(f"case {number}, {case.kind}: {word}", file=sys.stderr, flush=True)
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
        "requests": seen.total(),
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


def serve(port: int, grpc_port: int) -> None:
    """Run a gateway until the standard input ends; each line on it asks for figures."""
    import uvloop

    from tenuto.deployments.entry.gateway import Entry
    from tenuto.deployments.process.own_loop import spare_the_collector
    from tenuto.deployments.serve.user_config import read_gateway_config
    from tenuto.deployments.wire.peer import Endpoint
    from tests.instruments.fake_gpulet import FakeGpulet, finder

    plan = _plan()
    gpulets = {"a": FakeGpulet("a", ("m",)), "b": FakeGpulet("b", ("n",))}
    command = [sys.executable, __file__, "--generate"]
    writer = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None
    assert writer.stdin is not None
    endpoint = Endpoint(*json.loads(writer.stdout.readline()))

    async def find_writer() -> Endpoint:
        return endpoint

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
        entry = Entry(lambda name: find_writer if name == "w" else finder(gpulets)(name))
        config = {"plan": plan.to_data(), "scheduler": {"name": "eager"}, "keys": hashes}
        for name, its_port in (("listen", port), ("grpc", grpc_port)):
            config[name] = {"host": "127.0.0.1", "port": its_port}
        await entry.follow(read_gateway_config(config))
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
        print(file=writer.stdin, flush=True)
        held_blocks = int(writer.stdout.readline())
        # What nothing refers to is freed and given back first: it made up 10 MiB of the growth over 40,000 requests.
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        said = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        found = {
            **{name: round(value, 1) for name, value in longest.items()},
            "memory_mib": round(int(said["RssAnon"].split()[0]) / 1024, 1),
            "shared_mib": round(int(said["RssShmem"].split()[0]) / 1024, 1),  # slots for bodies, which are kept
            "held_blocks": held_blocks,
            "unfinished_bytes": entry.server.status().unfinished_bytes,
            "connections": entry.server.status().connections,
        }
        print(json.dumps(found), flush=True)


def _plan() -> Any:
    """Two networks on gpu-lets that answer at once, and one that generates, whose steps take 1 ms."""
    from tenuto.placement import Plan
    from tenuto.profiles.generation import StepCost
    from tests.instruments.fake_gpulet import make_plan

    data = make_plan(("a", ("m",)), ("b", ("n",)), slo_ms=60_000.0).to_data()
    steps = StepCost.line(1.0, 0.0, 0.0, 0.0, 0.0).model_dump(mode="json")
    lengths = {"prompt_tokens": 20, "output_tokens": 20, "max_sequences": 64, "max_batch_tokens": 512}
    model = {"name": "w", "batch_size": 64, "kv_tokens": 16_384, "steps": steps}
    data["gpus"].append({"id": "v", "type": "v100"})
    data["gpulets"].append({"id": "w", "gpu": "v", "share_pct": 50, "models": [model]})
    slo = {"ttft_ms": 60_000, "tpot_ms": 60_000}
    options = {"tokenizer": "bytes"}
    data["models"].append({"name": "w", "rate_rps": 10, "slo": slo, "generates": lengths, "options": options})
    return Plan.from_data(data)


def generate() -> None:
    """Run the gpu-let that generates until the standard input ends; each line on it asks for the blocks that are
    held."""
    from tenuto.deployments.gpulet.replica import LocalReplica
    from tenuto.deployments.serve.deployment import Deployment

    (config,) = [each for each in Deployment(plan=_plan()).config().gpulets if each.spec and each.spec.gpulet == "w"]

    async def run() -> None:
        replica = await LocalReplica.start(config.spec, config.user_config)
        print(json.dumps(await replica.endpoint()), flush=True)
        while await asyncio.to_thread(sys.stdin.readline):
            generator = replica.executor.generator("w")
            print(generator.blocks - generator.free_blocks, flush=True)
        await replica.close()

    asyncio.run(run())


def main() -> None:
    """Fuzz, print the result, and end with 1 where something is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--first", type=int, default=0, help="the number of the first case")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--together", type=int, default=32, help="connections at a time")
    parser.add_argument("--case", type=int, help="print what this case of the seed sends, and nothing else")
    parser.add_argument("--serve", type=int, nargs=2, metavar="PORT", help=argparse.SUPPRESS)
    parser.add_argument("--generate", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("-o", "--output", metavar="FILE", help="write the result there as well")
    args = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parents[2]))
    if args.serve is not None:
        serve(*args.serve)
        return
    if args.generate:
        generate()
        return
    if args.case is not None:
        (case,) = cases(args.seed, args.case + 1, args.case)
        sys.stdout.buffer.write(case.sent)
        return
    from tenuto.deployments.serve.launcher import unused_port

    port, grpc_port = unused_port(), unused_port()
    command = [sys.executable, __file__, "--serve", str(port), str(grpc_port)]
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
            result = asyncio.run(fuzz(port, grpc_port, args.seed, args.first, args.requests, args.together, figures))
        finally:
            server.stdin.close()
    result["seconds"] = round(time.monotonic() - began_at, 1)
    last = result["server"]
    faults = [f"{result['wrong_count']} cases went wrong"] if result["wrong_count"] else []
    faults += [f"the loop stood for {last['stood_ms']} ms, {last['over']} times too long"] if last["over"] else []
    grown = result["memory_growth_mib"]
    faults += [f"memory grew by {grown} MiB"] if grown > _GROWTH_MIB else []
    faults += [f"{last['held_blocks']} blocks of sequences are kept"] if last["held_blocks"] else []
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
