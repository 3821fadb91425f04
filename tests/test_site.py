"""The site of the documents builds without a warning, holds what the code has, and loads nothing from elsewhere."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from tenuto.cli import VERBS, load_verb
from tenuto.deployments.operator.exposition import render_metrics
from tests.instruments.shown_status import ShownServer

ROOT = Path(__file__).parents[1]

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("material") is None,
        reason="mkdocs-material is not installed: pip install tenuto[docs]",
    ),
    pytest.mark.xdist_group("site"),  # one process builds it
]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Broken links, links to headings that are not there, and pages that are not in the navigation end the build."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    built = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, timeout=300
    )
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


def text_of(site: Path, page: str) -> str:
    """What a reader sees of a page of the reference."""
    html = (site / "reference" / f"{page}.html").read_text(encoding="utf-8")
    return re.sub(r"\s+", " ", re.sub(r"<[^>]*>", "", html[html.index("<article") :]))


def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    tag = r"<(?:script|link|img|iframe|source)\b[^>]*?\b(?:src|href)=\"?((?:https?:)?//[^\"\s>]+)"
    loaded = rf"{tag}|url\(\"?((?:https?:)?//[^)]+)"
    found = {
        (str(file.relative_to(site)), *match)
        for pattern in ("*.html", "*.css")
        for file in site.rglob(pattern)
        for match in re.findall(loaded, file.read_text(encoding="utf-8"))
    }
    assert found == set()


def options(name: str, command: click.Command | None) -> Iterator[str]:
    assert command is not None
    yield name
    yield from (option.opts[-1] for option in command.params if isinstance(option, click.Option) and not option.hidden)
    if isinstance(command, click.Group):
        for part, below in command.commands.items():
            yield from options(f"{name} {part}", below)


def test_the_site_says_every_command_and_option(site: Path) -> None:
    text = text_of(site, "commands")
    assert [each for verb in VERBS for each in options(f"tenuto {verb}", load_verb(verb)) if each not in text] == []


def test_every_metric_is_on_the_site(site: Path) -> None:
    server = ShownServer(models=5, gpulets=8)
    server.second()
    named = re.findall(r"^# HELP (\S+) \S", render_metrics(server.status()), re.M)
    text = text_of(site, "metric-names")
    assert len(named) > 30
    assert [name for name in named if name not in text] == []


@pytest.mark.parametrize("page", ["commands", "result-keys", "python-names", "policies", "metric-names", "log-lines"])
def test_what_is_made_of_the_code_reads_like_text(site: Path, page: str) -> None:
    """No Python where words should be."""
    text = text_of(site, page)
    assert len(text) > 2000
    assert re.findall(r"<class|NoneType|object at 0x|Initialize self|PydanticUndefined|typing\.", text) == []
