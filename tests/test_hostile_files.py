"""Whatever is in a file that we read: it is accepted, or refused with the error of wrong input, within bounds of time
and memory."""

from __future__ import annotations

import ast
import itertools
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field

from tenuto.cli import main
from tenuto.deployments.process.apart import run_apart
from tenuto.documents import StrictModel, dump_yaml, load_document, parse_document
from tenuto.errors import EnvironmentFaultError, InvalidInputError
from tenuto.files import MOST_DEPTH, MOST_ENTRIES, parse_json, parse_number, parse_yaml
from tenuto.placement import Workload
from tenuto.placement.arrivals.arrival_processes import read_trace
from tests.instruments.mutated_files import READERS, ROOT, is_accepted, mutated

BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n"
    for before, name in zip("abcdefghi", "bcdefghij", strict=True)
)
MODELS = "models:\n" + "".join(f"- {{name: m{number}, rate_rps: 1, slo_ms: 50}}\n" for number in range(200_000))
MUTATIONS = 20  # of each reader's file; lab/benchmarks/fuzz_files.py makes a million


@pytest.mark.parametrize("name", READERS)
def test_mutated_files_are_accepted_or_refused(name: str, tmp_path: Path) -> None:
    reader = READERS[name]
    assert is_accepted(reader, reader.valid, tmp_path)
    for seed in range(MUTATIONS):
        is_accepted(reader, mutated(reader.valid, random.Random(f"{name} {seed}")), tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 50_000, f"line 1: is more than {MOST_DEPTH} levels deep"),
        ("a: 1\nb: " + "{a: " * 20_000, f"line 2: is more than {MOST_DEPTH} levels deep"),
        ("- " * 50_000, f"is more than {MOST_DEPTH} levels deep"),
        (BOMB, f"line 6: has more than {MOST_ENTRIES:,} entries"),
        ("a: 1\nx: &x [*x]", r"line 2: alias \*x stands for nothing"),
        (MODELS, f"has more than {MOST_ENTRIES:,} entries"),
        ("a: 1\nb: 2\na: 3", "line 3: 'a': this key is given twice"),
        ("a: " + "9" * 5_000, "line 1: .*more than 400 characters"),
        ("a: " + "9" * 25, "line 1: .*more than 64 bits"),
        ("a: 1e-320", "line 1: '1e-320': is not 0, and not between"),
        ("a: 1e999", "line 1: '1e999': is not 0, and not between"),
        ("a: !!python/name:os.system x", "line 1: .*is not known"),
        ("a: !!binary aGk=", "line 1: .*is not known"),
        ("? [a]\n: 1", "line 1: a key is a list"),
        ("a: 1\n---\nb: 1", "line 2: a second document"),
        ("a: [1,\nb: {", "line 3, column 1: not valid YAML"),
        ("%TAG ! x\n" * 200 + "--- 1", "lines of %TAG"),
    ],
    ids=itertools.count(),
)
def test_hostile_yaml_is_refused_with_its_line(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "f.yaml").write_text(text, "utf-8")
    with pytest.raises(InvalidInputError, match=rf"f\.yaml: .*{message}|f\.yaml: {message}"):
        load_document(tmp_path / "f.yaml")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 50_000, "levels deep"),
        ('{"a": 1,\n"b": 1,\n"a": 2}', 'line 3: key "a" is given twice'),
        ("9" * 5_000, "more than 400 characters"),
        ("NaN", "NaN is no number of JSON"),
        ('["\\ud800"]', "half a character"),
        ('"\\"' * 100_000, "not valid JSON"),
        ("[" + "0," * 4 * MOST_ENTRIES, "entries"),
        ('{"a": 1,\n"b"}', "line 2, column 4"),
    ],
    ids=itertools.count(),
)
def test_hostile_json_is_refused(text: str, message: str) -> None:
    with pytest.raises(InvalidInputError, match=rf"f\.json: .*{message}"):
        parse_json(text, "f.json")


def test_arguments_that_are_no_text_are_refused() -> None:
    """Python has bytes of the command line that are no UTF-8 as halves of characters."""
    with pytest.raises(InvalidInputError, match="not valid YAML or JSON"):
        parse_yaml("{name: \udcff}", "ENTRY")


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, kind in ((tmp_path / "pipe", "a pipe"), (Path("/dev/zero"), "a device"), (tmp_path, "a folder")):
        for reader in READERS.values():
            if not reader.file:
                with pytest.raises(InvalidInputError, match=f"{kind}|directory"):
                    reader.read(path)


@pytest.mark.parametrize("value", ["yes", "true", "on", "'50'", "1e-320", "010:00", "2001-01-01", ".inf", ".nan"])
def test_a_rate_is_a_number(value: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "w.yaml").write_text(f"models:\n- {{name: resnet50, rate_rps: {value}, slo_ms: 50}}\n", "utf-8")
    with pytest.raises(SystemExit) as ended:
        main(["plan", str(tmp_path / "w.yaml"), "--gpus", "v100:1"])
    assert ended.value.code == 2
    assert "w.yaml" in (said := capsys.readouterr().err)
    assert "internal" not in said


def test_yaml_is_that_of_1_2() -> None:
    text = "[yes, Off, True, 010, 0o17, 0x1F, 1e3, .5, 1_000, 1:30, 2001-01-01, ~, Null, -.inf, '1', +7]"
    found = [
        "yes",
        "Off",
        True,
        10,
        15,
        31,
        1000.0,
        0.5,
        "1_000",
        "1:30",
        "2001-01-01",
        None,
        None,
        -float("inf"),
        "1",
        7,
    ]
    assert parse_yaml(text) == found
    assert parse_yaml("a: &a {x: 1, y: 1}\nb: {<<: *a, y: 2}")["b"] == {"x": 1, "y": 2}
    assert parse_yaml("") is None


@given(st.recursive(st.none() | st.booleans() | st.text() | st.integers(-(2**63), 2**63), st.lists, max_leaves=5))
def test_what_we_write_is_read_as_it_was(data: Any) -> None:
    assert parse_yaml(dump_yaml({"a": data})) == {"a": data}


@pytest.mark.parametrize("text", ["1e5", "0o17", "0x1F", "007", "1e-320", "yes", "null", "~", ".5", "1_000", "<<"])
def test_texts_that_look_like_something_else_stay_texts(text: str) -> None:
    assert parse_yaml(dump_yaml({text: text})) == {text: text}


@pytest.mark.parametrize("text", ["", "x", "1e", "1e400", "1e-400", "9" * 401, "0b1", "nan", "inf", "1_000", "１"])
def test_what_is_no_number_within_bounds(text: str) -> None:
    with pytest.raises(ValueError, match="is"):
        parse_number(text)


def test_files_are_read_as_other_programs_save_them(tmp_path: Path) -> None:
    workload = "models: [{name: resnet50, rate_rps: 10, slo_ms: 50}]\n"
    for encoding in ("utf-8", "utf-8-sig", "utf-16"):
        (tmp_path / "w.yaml").write_text(workload, encoding)
        (tmp_path / "w.json").write_text('{"models": [{"name": "resnet50", "rate_rps": 10, "slo_ms": 50}]}', encoding)
        assert Workload.load(tmp_path / "w.yaml") == Workload.load(tmp_path / "w.json")
    for encoding in ("utf-8", "utf-8-sig"):
        (tmp_path / "t.csv").write_text("time_ms,model\r\n0,a\r\n5,b\r\n", encoding, newline="")
        assert read_trace(tmp_path / "t.csv").models == ["a", "b"]


def test_what_hangs_or_takes_too_much_apart_from_us_is_ended() -> None:
    with pytest.raises(EnvironmentFaultError, match=r"took more than 0\.1 s and was ended"):
        run_apart(time.sleep, 600, limit_s=0.1)
    with pytest.raises(EnvironmentFaultError, match="GiB are needed"):
        run_apart(bytes, 1 << 40)
    with pytest.raises(EnvironmentFaultError, match="ended with -6"):
        run_apart(os.abort)
    with pytest.raises(InvalidInputError, match="no such file"):
        run_apart(load_document, "absent.yaml")
    assert run_apart(sys.intern, "found") == "found"


# Modules that read files beside `tenuto.files`, and why no user's file is among these.
OTHERS = {
    **dict.fromkeys(
        ("profiles/gpu_types.py", "profiles/mig_instances.py", "profiles/networks/catalogue.py", "profiles/shipped.py"),
        "our own data",
    ),
    **dict.fromkeys(("placement/interference/contention.py", "tenuto/quickstart.py"), "our own data"),
    "deployments/entry/protocols/grpc_messages.py": "our own data",
    **dict.fromkeys(("deployments/wire/liveness.py", "deployments/wire/arena.py", "mps/processes.py"), "/proc"),
    **dict.fromkeys(("deployments/process/foreground.py", "deployments/machines/environment.py"), "/proc"),
    **dict.fromkeys(("profiles/measuring/memory_meter.py", "profiles/measuring/profile_worker.py"), "/proc"),
    "loadgen/result_folder.py": "/proc",
    "mps/daemon.py": "the pid that NVIDIA's daemon writes",
    "deployments/offline/batch_store.py": "clients' files, line by line within limits",
    "deployments/process/ray_token.py": "a file that only this user may read, which Ray reads too",
    "deployments/process/ray_address.py": "/proc",
    "deployments/serve/process_logs.py": "logs of our processes, by part",
    "tenuto/cli/__init__.py": "/dev/null",
    "deployments/entry/service/hook_process.py": "/dev/null",
    "profiles/networks/grammars.py": "a tokenizer, whole, for the package that reads it",
    "tenuto/documents.py": "writes",
    "loadgen/run_files.py": "writes",
}
FOLDERS = ("profiles", "mps", "placement", "batching", "deployments", "loadgen", "tenuto")


def test_files_are_read_in_one_place() -> None:
    def reads(call: ast.Call) -> bool:
        name = ast.unparse(call.func)
        return name in ("open", "io.open", "yaml.load", "yaml.safe_load", "csv.reader", "csv.DictReader") or (
            name.endswith((".read_text", ".read_bytes", ".open"))
            and not name.startswith(("os.", "Image.", "sender.", "super", "urllib."))
        )

    found = {
        str(file.relative_to(ROOT))
        for folder in FOLDERS
        for file in (ROOT / folder).rglob("*.py")
        if not any(parent.is_symlink() for parent in file.parents if parent != ROOT)
        and any(isinstance(node, ast.Call) and reads(node) for node in ast.walk(ast.parse(file.read_text("utf-8"))))
    }
    assert found == {*OTHERS, "tenuto/files.py"}


def test_an_empty_list_beside_thousands_of_faults_is_a_fault_like_them() -> None:
    class Lists(StrictModel):
        first: list[int] = Field(min_length=1)
        then: list[int]

    with pytest.raises(InvalidInputError, match=r"first: (.|\n)*10002 problems"):
        parse_document(Lists, {"first": [], "then": ["x"] * 10_001})
