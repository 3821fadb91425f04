"""Folders of results. No result is overwritten unasked, and each file of a result is either complete or not there."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from tenuto import version as tenuto_version
from tenuto.documents import write_whole
from tenuto.errors import EnvironmentFaultError, InvalidInputError

_PACKAGES = ("ray", "torch", "torchvision", "transformers", "numpy")


def prepare_folder(folder: Path, names: Sequence[str], what: str, *, force: bool) -> Path:
    """Create a folder for results.

    Args:
        folder: the folder.
        names: names of the files that will be written.
        what: a word for these files together, such as `report`.
        force: whether files of an earlier run may be replaced.

    Raises:
        InvalidInputError: the folder has such files already and `force` is not set, it is a file, or it cannot be
            created.
    """
    if folder.exists() and not folder.is_dir():
        raise InvalidInputError(f"{folder} is a file. Give a folder for the {what}.")
    existing = [name for name in names if (folder / name).exists()]
    if existing and not force:
        raise InvalidInputError(
            f"{folder} already holds a {what} ({', '.join(existing)}). Give another folder, or --force."
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidInputError(f"{folder} cannot be created: {error.strerror}. Give another folder.") from error
    return folder


def write_files(folder: Path, contents: Mapping[str, str | Callable[[Path], None]]) -> None:
    """Write files in order. The content of each is a text, or a function that writes to a path.

    Raises:
        EnvironmentFaultError: a file cannot be written; the message says which ones were.
    """
    written: list[str] = []
    for name, content in contents.items():
        try:
            write_whole(folder / name, content)
        except OSError as error:
            raise EnvironmentFaultError(
                f"{folder / name}: {error.strerror or error}. Written before: {', '.join(written) or 'nothing'}. "
                "Free space or give another folder."
            ) from error
        written.append(name)


def provenance(command: Sequence[str]) -> dict[str, Any]:
    """Return the command, date, hardware and versions of a run."""
    return {
        "command": list(command),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "hardware": hardware(),
        "versions": versions(),
    }


def hardware() -> dict[str, Any]:
    """Return the hardware that figures are measured on: processor, cores, system."""
    processor = platform.processor() or platform.machine()
    cores = None
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                processor = line.split(":", 1)[1].strip()
                break
        cores = len(os.sched_getaffinity(0))
    except OSError:
        pass
    return {
        "processor": processor,
        "cores": cores,
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }


def versions() -> dict[str, str]:
    """Return the versions of the packages that matter for the figures; absent ones are left out."""
    by_package = {"tenuto": tenuto_version()}
    for name in _PACKAGES:
        try:
            by_package[name] = version(name)
        except PackageNotFoundError:
            continue
    return by_package
