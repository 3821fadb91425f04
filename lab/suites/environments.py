"""Environments of other people's programs, each in a folder of its own: Python's, npm's and Debian's packages.

Nothing is installed outside the folder. A folder is used again while it was made for the same packages.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

# The release that the laboratory itself runs with. Where only a CUDA build of it is to be had, nothing is installed.
CONSTRAINTS = ("torch==2.13.0",)
CUDA = ("nvidia-cu", "cuda-")  # how the packages begin that a CUDA build of torch brings
INSTALL_S = 1800.0  # limit: for what never ends


class UnavailableError(Exception):
    """What a suite needs cannot be had on this machine; the message says what, and what to do."""


def run(
    command: Sequence[str | Path],
    *,
    timeout_s: float = 300.0,
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
    given: str = "",
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end with `given` at its standard input; what it prints to either output is in `stdout`.

    One that takes longer than `timeout_s` is ended; it has the exit status 124, as `timeout` gives it.
    """
    try:
        return subprocess.run(
            [str(word) for word in command],
            input=given,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
            timeout=timeout_s,
            env={**os.environ, **(environment or {})},
            cwd=folder,
            check=False,
        )
    except subprocess.TimeoutExpired as late:
        said = late.output.decode("utf-8", "replace") if isinstance(late.output, bytes) else late.output or ""
        return subprocess.CompletedProcess(late.cmd, 124, f"{said}\nended after {timeout_s:g} s")


def _install(what: str, *command: str | Path, folder: Path | None = None) -> str:
    """Return what the command printed; raises `UnavailableError` with its last line when it failed."""
    done = run(command, timeout_s=INSTALL_S, folder=folder)
    if done.returncode:
        said = [line for line in done.stdout.splitlines() if line.strip()]
        raise UnavailableError(f"{what} cannot be installed: {said[-1] if said else done.returncode}")
    return done.stdout


def _made_once(folder: Path, packages: Sequence[str], make: Callable[[], None]) -> None:
    """Make an environment unless the folder has it; one that was made for other packages, or in part, goes first."""
    mark = folder / "made-for.json"
    if mark.exists() and json.loads(mark.read_text("utf-8")) == list(packages):
        return
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    make()
    mark.write_text(json.dumps(list(packages)), "utf-8")


def python_environment(folder: Path, *requirements: str, newer_python: str | None = None) -> Path:
    """Return the folder with the programs of a Python environment that has these packages.

    Args:
        newer_python: a requirement that asks for a newer Python than this one. It is installed all the same, and then
            what it needs, in releases for this Python.

    Raises:
        UnavailableError: they cannot be installed, or only with a CUDA build of torch.
    """
    programs = folder / "bin"
    pip = programs / "pip"

    def install(*words: str) -> None:
        asked = [pip, "install", "--quiet", *words]
        report = folder / "report.json"
        _install(", ".join(words), *asked, "--dry-run", "--report", report)
        names = [each["metadata"]["name"] for each in json.loads(report.read_text("utf-8"))["install"]]
        wrong = sorted(name for name in names if name.startswith(CUDA) and not any(name in word for word in words))
        if wrong:
            raise UnavailableError(
                f"pip would install a CUDA build of torch, with {', '.join(wrong)}. Show pip a CPU build of "
                f"{CONSTRAINTS[0]} by PIP_FIND_LINKS."
            )
        _install(", ".join(words), *asked)

    def make() -> None:
        _install("a Python environment", sys.executable, "-m", "venv", folder)
        constraints = folder / "constraints.txt"
        constraints.write_text("\n".join(CONSTRAINTS) + "\n", "utf-8")
        if newer_python is not None:
            install("--no-deps", "--ignore-requires-python", newer_python)
            name = newer_python.partition("==")[0]
            needs = f"import importlib.metadata as m; print(*m.requires({name!r}), sep='\\n')"
            listed = _install(f"what {name} needs", programs / "python", "-c", needs).splitlines()
            install("-c", str(constraints), *(line for line in listed if "extra ==" not in line))
        if requirements:
            install("-c", str(constraints), *requirements)

    _made_once(folder, [*requirements, *([newer_python] if newer_python else [])], make)
    return programs


def node_environment(folder: Path, *packages: str) -> Path:
    """Return a folder whose `node_modules` has these packages of npm; raises `UnavailableError`."""
    if shutil.which("npm") is None:
        raise UnavailableError("npm is missing. Install Node.js 20 or later.")
    words = ("--no-audit", "--no-fund", "--silent", "--prefix", str(folder))
    _made_once(folder, packages, lambda: _install(", ".join(packages), "npm", "install", *words, *packages) and None)
    return folder


def debian_environment(folder: Path, *packages: str) -> Path:
    """Return a folder in which Debian's packages lie unpacked, with all that they need and this machine has not.

    Nothing is installed, so no daemon that a package brings is started. `debian_variables` makes the programs run.

    Raises:
        UnavailableError: this is no Debian, or the packages cannot be downloaded.
    """
    if shutil.which("apt-get") is None:
        raise UnavailableError(f"{', '.join(packages)}: packages of Debian, and apt-get is missing here.")

    def make() -> None:
        archives = folder / "archives"
        (archives / "partial").mkdir(parents=True)
        settings = ("-o", "Debug::NoLocking=1", "-o", f"Dir::Cache::archives={archives}")
        words = ("--yes", "--no-install-recommends", "--download-only", "--reinstall")
        _install(f"{', '.join(packages)} (try apt-get update)", "apt-get", *settings, *words, "install", *packages)
        for archive in archives.glob("*.deb"):
            _install(archive.name, "dpkg", "-x", archive, folder)
        shutil.rmtree(archives)

    _made_once(folder, packages, make)
    return folder


def debian_variables(folder: Path) -> dict[str, str]:
    """Return the environment in which programs of `debian_environment` find their libraries."""
    libraries = sorted({str(each.parent) for each in (folder / "usr/lib").rglob("*.so*")})
    return {"PATH": f"{folder}/usr/bin:{os.environ['PATH']}", "LD_LIBRARY_PATH": ":".join(libraries)}
