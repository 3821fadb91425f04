"""Pids of processes in other PID namespaces, from a /proc made of files."""

import os
from pathlib import Path

from tenuto.mps.processes import Processes


def process(proc: Path, pid: int, numbers: str, namespace: int | None, name: str = "python") -> None:
    entry = proc / str(pid)
    (entry / "ns").mkdir(parents=True)
    (entry / "status").write_text(f"Name:\t{name}\nPid:\t{pid}\nNSpid:\t{numbers}\nUid:\t0\n", encoding="utf-8")
    (entry / "cmdline").write_bytes(f"/usr/bin/{name}\0-m\0x\0".encode())
    if namespace is not None:
        os.symlink(f"pid:[{namespace}]", entry / "ns" / "pid")


def container(tmp_path: Path) -> tuple[Processes, Path]:
    """A container, namespace 77, whose process 41 is 9041 on the host."""
    own, host = tmp_path / "proc", tmp_path / "host"
    process(own, 41, "41", 77)
    os.symlink("41", own / "self")
    process(host, 9041, "9041\t41", 77)
    process(host, 9050, "9050\t41", 78)  # of another container
    process(host, 41, "41", 1)
    return Processes(own), host


def test_a_process_is_found_by_its_number_and_namespace(tmp_path: Path) -> None:
    processes, host = container(tmp_path)
    assert processes.namespace() == 77
    assert processes.numbers_elsewhere(41, host) == {9041}
    assert processes.numbers_elsewhere(42, host) == frozenset()
    assert processes.numbers_elsewhere(41, tmp_path / "nowhere") == frozenset()


def test_two_that_it_could_be_are_none(tmp_path: Path) -> None:
    processes, host = container(tmp_path)
    process(host, 9060, "9060\t41", None)  # its namespace may not be read
    assert processes.numbers_elsewhere(41, host) == frozenset()


def test_nested_containers_have_a_number_in_each(tmp_path: Path) -> None:
    processes, host = container(tmp_path)
    process(host, 9070, "9070\t300\t55", 77)
    assert processes.numbers_elsewhere(55, host) == {9070, 300}


def test_names_are_those_of_programs(tmp_path: Path) -> None:
    processes, _ = container(tmp_path)
    assert processes.name_of(41) == "python"
    assert processes.name_of(1) is None
    assert Processes().namespace() is not None
