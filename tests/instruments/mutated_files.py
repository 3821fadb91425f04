"""Every reader of files with a valid file, and mutations of it: bytes, lines, structure, numbers."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from tenuto.cli.deploying import read_deployment
from tenuto.deployments.control.settings import ControlSettings
from tenuto.deployments.security.keys import read_keys
from tenuto.deployments.serve.sub_clusters import read_partition
from tenuto.errors import InvalidInputError
from tenuto.loadgen.run import load_document, load_run
from tenuto.placement import Cluster, Plan, Workload
from tenuto.placement.arrivals.arrival_processes import read_trace
from tenuto.placement.interference.contention import Constants
from tenuto.placement.slo_rules import load_workload
from tenuto.profiles import Profile
from tenuto.profiles.measuring.kernels.chrome_trace import load_chrome_trace

ROOT = Path(__file__).parents[2]
FORMATS = ROOT / "tests" / "data" / "formats" / "1"
DATA = ROOT / "profiles" / "data"


class Reader(NamedTuple):
    """A reader and a file that it takes. `file`: its name, where the reader expects one in a folder."""

    read: Callable[[Path], Any]
    valid: bytes
    suffix: str = ".yaml"
    file: str = ""


_WORKLOAD = b"""\
models:
  - {name: resnet50, rate_rps: 100, slo_ms: 50, arrival: {process: gamma, options: {cv: 2.0}},
     latency: {alpha_ms: 1.5, beta_ms: 5}}
  - {name: "vgg19:2", rate_rps: 5.5e+1, slo_ms: 80, share_pct: 5, weight: 2, only_on: [n0],
     latency: {points: {1: 3.0, 4: 5.0}}}
  - name: vgg19
    rate_rps: 20
    slo_ms: 80
    options: &o {dtype: float16, sizes: [1, 2]}
  - name: llm
    rate_rps: 1
    slo: {ttft_ms: 500, tpot_ms: 50}
    generates:
      prompt_tokens: {quantiles: {0: 1, 50: 30, 100: 400}}
      output_tokens: {lognormal: {median: 30, sigma: 1}}
    options: *o
mps: off
objective: each
applications:
  - name: a
    slo_ms: 200
    rate_rps: 5
    stages:
      - {name: s, model: resnet50, inputs: {x: image}}
      - {name: t, model: vgg19, after: [s], map: "a.b:c", count: 2.5, most: 9, allow_missing: true}
      - {model: own, inputs: {x: s.y, z: image}, latency: {alpha_ms: 1, beta_ms: 2}, part: 2}
    outputs: {y: own.y, t: t.y}
"""
_CLUSTER = b"""\
schema: 1
nodes:
  - {name: n0, rack: r0, gpus: [{type: v100, count: 4, memory_mib: 16000}]}
  - {name: n1, gpus: [{type: a100, count: 2}]}
elastic: false
"""
_RULES = b"models:\n  - {name: resnet50, rate_rps: 10, slo: 2 x l(1)}\n  - {name: bert, rate_rps: 10, slo_ms: 80}\n"
_KEYS = (
    b"keys:\n  - {name: anna, sha256: " + b"a1" * 32 + b", rate_rps: 5}\n  - {name: ben, sha256: " + b"b2" * 32 + b"}\n"
)
_CONTROL = b"mode: act\ninterval_s: 5\nattainment: 0.95\nstandby_pct: 10\ngpus: {v100: {min: 1, max: 4}}\nwhen: {}\n"
_TRACE = b"time_ms,model,prompt_tokens,output_tokens\n0,a,1,2\n1.5,b,10,20\n1e3,a,7,9\n"
_KERNEL = {
    "ph": "X",
    "cat": "kernel",
    "name": "k",
    "ts": 1.5,
    "dur": 2.0,
    "args": {"device": 0, "grid": [1, 2, 3], "block": [32, 1, 1], "registers per thread": 32, "correlation": 5},
}
_COPY = {"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy HtoD", "ts": 0, "dur": 1, "args": {"device": 0, "bytes": 9}}
_CHROME = json.dumps(
    {
        "deviceProperties": [{"id": 0, "name": "V100", "computeMajor": 7, "computeMinor": 0, "numSms": 80}],
        "traceEvents": [_KERNEL, _COPY],
    },
    indent=1,
).encode()


def _in_a_service(config: bytes) -> bytes:
    lines = b"".join(b"    " + line for line in config.splitlines(keepends=True))
    return b"kind: RayService\nmetadata: {name: x}\nspec:\n  serveConfigV2: |\n" + lines


def _read_alone(path: Path) -> Any:
    return load_workload(path, None, None)


_SERVED = (FORMATS / "serve-config.yaml").read_bytes()
READERS: dict[str, Reader] = {
    "workload": Reader(Workload.load, _WORKLOAD),
    "workload with rules": Reader(_read_alone, _RULES),
    "cluster": Reader(Cluster.load, _CLUSTER),
    "plan": Reader(Plan.load, (FORMATS / "plan.json").read_bytes(), ".json"),
    "plan as YAML": Reader(Plan.load, (FORMATS / "plan.json").read_bytes()),
    "Serve config": Reader(read_deployment, _SERVED),
    "RayService": Reader(read_deployment, _in_a_service(_SERVED)),
    "profile": Reader(Profile.load, (FORMATS / "profile.yaml").read_bytes()),
    "constants": Reader(Constants.load, (DATA / "contention-v100.yaml").read_bytes()),
    "keys": Reader(read_keys, _KEYS),
    "control": Reader(ControlSettings.load, _CONTROL),
    "partition": Reader(read_partition, b"assignment: {resnet50: 0, vgg19: 1}\n"),
    "trace": Reader(read_trace, _TRACE, ".csv"),
    "kernels": Reader(load_chrome_trace, _CHROME, ".json"),
    "result": Reader(
        lambda path: load_document(path.parent), (FORMATS / "run" / "result.json").read_bytes(), file="result.json"
    ),
    "records": Reader(
        lambda path: load_run(path.parent), (FORMATS / "run" / "requests.parquet").read_bytes(), file="requests.parquet"
    ),
}

_WORDS = [
    *(
        b"yes",
        b"no",
        b"on",
        b"off",
        b"true",
        b"null",
        b"~",
        b"",
        b".inf",
        b"-.inf",
        b".nan",
        b"NaN",
        b"Infinity",
        b"nan",
    ),
    *(
        b"0",
        b"-1",
        b"1e-320",
        b"1e400",
        b"1e99",
        b"-0.0",
        b"1_000",
        b"0x1F",
        b"0o17",
        b"1:30:00",
        b"2001-12-14",
        b"010",
    ),
    *(
        b"9" * 25,
        b"9" * 5000,
        b"1" + b"0" * 400 + b".5",
        b"1e" + b"9" * 50,
        b"18446744073709551616",
        b"0.1" + b"1" * 300,
    ),
    *(
        b"[]",
        b"{}",
        b"[1, 2]",
        b"{a: 1}",
        b"'x'",
        b'"1"',
        b'"\\ud800"',
        b"!!int x",
        b"!!binary aGk=",
        b"*o",
        b"<<",
        b"\xff\xfe",
    ),
    *(
        b"a" * 3000,
        "ünï\u2028\U0001f600".encode(),
        b"\x00",
        b"\x85",
        b"\xef\xbb\xbf",
        b"'",
        b'"',
        b"|",
        b">-",
        b"?",
        b"%TAG ! x",
    ),
]
_BOMB = b"a: &a [x, x, x, x, x, x, x, x, x]\n" + b"".join(
    b"%c: &%c [%s]\n" % (98 + level, 98 + level, b", ".join([b"*%c" % (97 + level)] * 9)) for level in range(9)
)
_BLOCKS = [
    *(b"[" * 50_000, b"{a: " * 20_000, b"- " * 30_000, b"[" * 60 + b"]" * 60, b'{"a":' * 2_000, _BOMB, b"x: &x [*x]\n"),
    *(
        b"---\n",
        b"...\n",
        b"- x\n" * 5_000,
        b"k: {" + b"a: 1, " * 3_000 + b"}\n",
        b"#" * 9_000,
        b"\t",
        b"\n" * 5_000,
        b"\r",
    ),
]


def mutated(valid: bytes, chance: random.Random) -> bytes:
    """Return a file with one to four changes."""
    made = valid
    for _ in range(chance.choice((1, 1, 1, 2, 4))):
        made = chance.choice(_CHANGES)(made, chance)
    return made


def _bytes(made: bytes, chance: random.Random) -> bytes:
    at, much = chance.randrange(len(made) + 1), chance.choice((0, 1, 1, 2, 30, len(made)))
    there = bytes(chance.randrange(256) for _ in range(chance.choice((0, 1, 1, 3))))
    return made[:at] + there + made[at + much :]


def _bits(made: bytes, chance: random.Random) -> bytes:
    if not made:
        return made
    at = chance.randrange(len(made))
    return made[:at] + bytes([made[at] ^ (1 << chance.randrange(8))]) + made[at + 1 :]


def _lines(made: bytes, chance: random.Random) -> bytes:
    lines = made.splitlines(keepends=True) or [b""]
    at, other = chance.randrange(len(lines)), chance.randrange(len(lines))
    kind = chance.randrange(5)
    if kind == 0:
        del lines[at]
    elif kind == 1:
        lines.insert(other, lines[at])
    elif kind == 2:
        lines[at], lines[other] = lines[other], lines[at]
    elif kind == 3:
        lines[at] = b" " * chance.randrange(5) + lines[at].lstrip() if chance.random() < 0.5 else b"  " + lines[at]
    else:
        lines[at] = lines[at] * chance.choice((2, 50))
    return b"".join(lines)


def _word(made: bytes, chance: random.Random) -> bytes:
    """Put something else in the place of a value: a number, a word, a key."""
    begins = [at for at in range(1, len(made)) if made[at - 1] in b" ,[{:" and made[at] not in b" ,[]{}:\n"]
    if not begins:
        return made
    begin = end = chance.choice(begins)
    while end < len(made) and made[end] not in b",]}:\n":
        end += 1
    return made[:begin] + chance.choice(_WORDS) + made[end:]


def _block(made: bytes, chance: random.Random) -> bytes:
    lines = made.splitlines(keepends=True) or [b""]
    at = chance.randrange(len(lines) + 1)
    block = chance.choice(_BLOCKS)
    if chance.random() < 0.5:
        where = made.find(b":", chance.randrange(len(made) + 1)) + 1
        return made[:where] + b" " + block + made[where:]
    return b"".join([*lines[:at], block, *lines[at:]])


_CHANGES: list[Callable[[bytes, random.Random], bytes]] = [
    _bytes,
    _bits,
    _lines,
    _lines,
    _word,
    _word,
    _word,
    _word,
    _block,
]


def is_accepted(reader: Reader, content: bytes, folder: Path) -> bool:
    """Read a file; return whether it was accepted, or refused in the way of wrong input. Other errors are raised."""
    path = folder / (reader.file or f"file{reader.suffix}")
    path.write_bytes(content)
    if reader.file == "requests.parquet":
        (folder / "result.json").write_bytes(READERS["result"].valid)
    try:
        reader.read(path)
    except InvalidInputError as error:
        if not str(error) or error.exit_code != 2:
            raise AssertionError(f"no message or another exit code: {error!r}") from error
        return False
    return True
