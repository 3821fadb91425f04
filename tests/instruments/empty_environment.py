"""Environments of Python that hold wheels and what their metadata asks for, and nothing else.

What is asked for is linked from the environment of the tests, which takes no time and no package index. So a module
that a wheel forgets, and a library that its metadata forgets, are missed as they would be on a user's machine.
"""

import functools
import os
import subprocess
import sys
import venv
from collections.abc import Collection, Iterable, Sequence
from importlib.metadata import Distribution, PackageNotFoundError, distribution, distributions
from pathlib import Path, PurePosixPath

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

__all__ = ["EmptyEnvironment", "asked_for"]


class EmptyEnvironment:
    """An environment with wheels in it, as pip installs them, and their requirements."""

    def __init__(self, folder: Path, wheels: Sequence[Path], extras: Collection[str] = ()) -> None:
        """Make it in a folder; `extras`: of the wheels."""
        venv.create(folder, with_pip=False, symlinks=True)
        self.bin = folder / "bin"
        pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "--python", str(folder)]
        subprocess.run([*pip, "install", "--no-deps", "--no-index", "--no-compile", *wheels], check=True)
        (site,) = folder.glob("lib/python*/site-packages")
        ours = {canonicalize_name(each.metadata["Name"]): each for each in distributions(path=[str(site)])}
        needed: dict[str, Distribution] = {}
        for each in ours.values():
            needed |= asked_for(each.requires or (), extras, known=ours)
        for name, found in needed.items():
            if name not in ours:
                _link(found, site)

    def run(self, *words: str, folder: Path) -> subprocess.CompletedProcess[str]:
        """Run one of its programs in a folder to its end."""
        return subprocess.run(
            [self.bin / words[0], *words[1:]],
            capture_output=True,
            text=True,
            timeout=600,
            cwd=folder,
            env=self.environment(),
        )

    def environment(self, **more: str) -> dict[str, str]:
        """Return the environment variables of a process in it."""
        path = f"{self.bin}:/usr/bin:/bin"
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "VIRTUAL_ENV"))}
        return {**kept, "PATH": path, **more}


def asked_for(
    requirements: Iterable[str], extras: Collection[str], *, known: dict[str, Distribution]
) -> dict[str, Distribution]:
    """Return the installed distributions that requirements lead to, by name.

    What others ask for and is not installed was not needed so far, and is left out.

    Raises:
        AssertionError: the requirements themselves ask for what is not installed, or for another version.
    """
    found: dict[str, Distribution] = {}
    done: set[tuple[str, str]] = set()
    waiting = [(Requirement(text), frozenset(extras), True) for text in requirements]
    while waiting:
        requirement, chosen, is_ours = waiting.pop()
        if requirement.marker and not any(requirement.marker.evaluate({"extra": extra}) for extra in ("", *chosen)):
            continue
        name = canonicalize_name(requirement.name)
        try:
            each = known.get(name) or distribution(name)
        except PackageNotFoundError:
            assert not is_ours, f"{requirement} is not installed"
            continue
        assert not is_ours or requirement.specifier.contains(each.version, prereleases=True), (
            requirement,
            each.version,
        )
        found[name] = each
        for extra in ("", *requirement.extras):
            if (name, extra) not in done:
                done.add((name, extra))
                waiting += [(Requirement(text), frozenset([extra]), False) for text in each.requires or ()]
    return found


def _files(found: Distribution) -> Iterable[PurePosixPath]:
    return (path for path in found.files or () if path.parts[0] != ".." and "__pycache__" not in path.parts)


@functools.cache
def _shared() -> set[tuple[str, ...]]:
    """Folders in site-packages, two deep, that several distributions have files in."""
    owners: dict[tuple[str, ...], set[str]] = {}
    for found in distributions():
        name = found.metadata["Name"]
        for folder in {path.parts[:depth] for path in _files(found) for depth in (1, 2) if len(path.parts) > depth}:
            owners.setdefault(folder, set()).add(name)
    return {folder for folder, names in owners.items() if len(names) > 1}


def _link(found: Distribution, site: Path) -> None:
    """Link a distribution's files into another site-packages, by the largest folders that are its alone."""
    for path in _files(found):
        depth = 1
        while path.parts[:depth] in _shared():
            depth += 1
        link = site.joinpath(*path.parts[:depth])
        if not link.is_symlink():
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(Path(str(found.locate_file(""))).joinpath(*path.parts[:depth]))
