"""Every file that Tenuto writes is whole or the one that was there before, on a full disk too; cut ones are refused."""

import ast
import contextlib
import errno
import os
import stat
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tenuto.cli.common import write_file
from tenuto.deployments.process.ray_token import make_token
from tenuto.documents import dump_yaml, load_document, write_whole
from tenuto.errors import EnvironmentFaultError, InvalidInputError, TenutoError
from tenuto.loadgen.result_folder import write_files
from tenuto.mps.faults import FaultLog
from tenuto.placement import Cluster
from tenuto.profiles.measuring.profile_writer import ProfileWriter
from tenuto.profiles.shipped import load_shipped

ROOT = Path(__file__).parents[1]
FOLDERS = ("profiles", "mps", "placement", "batching", "deployments", "loadgen", "tenuto")

# What else opens something for writing, and why it is no file that somebody keeps.
OTHERS = {
    ("tenuto/documents.py", "write_whole"): "the one",
    ("profiles/measuring/worker_process.py", "serve_parent"): "the standard output of a worker",
    ("deployments/control/planner.py", ""): "the standard output of a worker",
    ("deployments/process/apart.py", "main"): "likewise",
    ("profiles/measuring/memory_meter.py", "reset"): "a switch in /proc",
    ("tenuto/cli/__init__.py", "exit_code"): "a stream that was closed goes to /dev/null",
    ("mps/daemon.py", "_open"): "a lock, which stays empty",
    ("deployments/offline/batch_store.py", "lock"): "a lock, which stays empty",
    ("deployments/offline/batch_store.py", "copy_file"): "under a name that the database does not know yet",
    ("deployments/offline/batch_store.py", "_write"): "grows, and is cut to what the database knows",
    ("loadgen/run_files.py", "_write_timeline"): "given to write_files, which gives it a path that is renamed",
    ("loadgen/run_files.py", "_write_parquet"): "likewise",
    ("loadgen/schedule.py", "save"): "likewise",
}
WRITERS = {"write_text", "write_bytes", "to_csv", "write_table", "savefig", "savez", "savez_compressed"}


def writes(call: ast.Call) -> bool:
    """Whether a call writes a file under the name that it is given."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    if name in WRITERS:
        return True
    if name in ("open", "fdopen"):
        parts = list(ast.walk(call))
        modes = {each.value for each in parts if isinstance(each, ast.Constant) and isinstance(each.value, str)}
        flags = {each.attr for each in parts if isinstance(each, ast.Attribute)}
        return any(set(mode) <= set("rwaxbt+") and set(mode) & set("wax+") for mode in modes) or "O_CREAT" in flags
    return False


def found_writers() -> Iterator[tuple[str, str]]:
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*.py"):
            if any(each.is_symlink() for each in path.parents):
                continue
            for name in places(ast.parse(path.read_text(encoding="utf-8")), ""):
                yield path.relative_to(ROOT).as_posix(), name


def places(node: ast.AST, within: str) -> Iterator[str]:
    """The functions that write files, by name; empty for what a module does by itself."""
    if isinstance(node, ast.Call) and writes(node):
        yield within
    for child in ast.iter_child_nodes(node):
        is_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
        yield from places(child, child.name if is_function else within)  # type: ignore[attr-defined]


def test_nothing_else_writes_files() -> None:
    assert set(found_writers()) == set(OTHERS)


CALLS: dict[str, Callable[[Path], None]] = {
    "-o of a command": lambda path: write_file(str(path), "new" * 5000),
    "a report": lambda path: write_files(path.parent, {path.name: lambda part: _save(part, "new" * 5000)}),
    "a profile": lambda path: _book(path).write(),
    "the faults of a GPU": lambda path: FaultLog(path, lambda: 1.0).note(),
    "a function that writes": lambda path: write_whole(path, lambda part: _save(part, "new" * 5000)),
}


def _save(path: Path, text: str) -> None:
    path.write_text(text)


def _book(path: Path) -> ProfileWriter:
    writer = ProfileWriter(path, command="a test")
    writer.profile = load_shipped("thesis-v100")
    return writer


@pytest.mark.parametrize("call", CALLS.values(), ids=list(CALLS))
def test_on_a_full_disk_the_old_file_stays(
    call: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "kept.yaml"
    file.write_text("old")

    def full(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises((TenutoError, OSError), match="No space left"):
            call(file)
    assert file.read_text() == "old"
    assert os.listdir(tmp_path) == ["kept.yaml"]
    call(file)
    assert file.read_text() != "old"
    assert os.listdir(tmp_path) == ["kept.yaml"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip("a disk of its own cannot be mounted here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_on_a_disk_that_is_really_full_the_old_file_stays(small_disk: Path) -> None:
    for call in CALLS.values():
        file = small_disk / "kept.yaml"
        file.write_text("old")
        filler = small_disk / "filler"
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as stream:
            while True:
                stream.write(bytes(4096))
        with pytest.raises((TenutoError, OSError), match="No space left"):
            call(file)
        assert file.read_text() == "old"
        assert sorted(os.listdir(small_disk)) == ["filler", "kept.yaml"]
        filler.unlink()


def test_a_token_is_whole_or_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "token"))

    def full(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(EnvironmentFaultError, match="No space left"):
            make_token()
    assert os.listdir(tmp_path) == []
    make_token()
    assert os.listdir(tmp_path) == ["token"]


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    whole = Cluster.parse("v100:4,a100:2").dump()
    for end in range(len(whole) - 1):
        file.write_text(whole[:end])
        with pytest.raises(InvalidInputError):
            Cluster.load(file)
    for text in (whole, whole[:-1], whole + "\n\n", whole.replace("\n", "\r\n")):
        file.write_bytes(text.encode())
        assert len(Cluster.load(file).gpus) == 6


def test_what_is_written_by_hand_needs_no_mark(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text("a: 1\n")
    assert load_document(file) == {"a": 1}
    file.write_text(dump_yaml({"a": 1}).replace("a: 1", "a: 2"))  # changed by hand
    assert load_document(file) == {"a": 2}


def test_links_modes_and_pipes_stay_what_they_are(tmp_path: Path) -> None:
    file, link = tmp_path / "file.yaml", tmp_path / "link.yaml"
    file.write_text("old")
    file.chmod(0o640)
    link.symlink_to(file)
    write_whole(link, "new")
    assert link.is_symlink()
    assert (file.read_text(), stat.S_IMODE(file.stat().st_mode)) == ("new", 0o640)
    write_whole("/dev/null", "nothing")
    reader, writer = os.pipe()
    write_whole(f"/dev/fd/{writer}", "through a pipe")
    assert os.read(reader, 100) == b"through a pipe"
    os.close(reader)
    os.close(writer)
