"""Hook of mkdocs (mkdocs.yml): reference pages that are made of the code, pages from outside docs/, and their links.

Each function `…_page` returns a page as Markdown.
"""

from __future__ import annotations

import ast
import inspect
import json
import os
import re
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import click
from click.testing import CliRunner
from pydantic import BaseModel

import tenuto

ROOT = Path(__file__).resolve().parents[1]
REFERENCE = ROOT / "docs" / "reference"
FOLDERS = ("profiles", "mps", "placement", "batching", "deployments", "loadgen")
# Pages and files outside docs/ that pages lead to. The site has them at the same place below its root.
ALSO = ("CHANGELOG.md", "CONTRIBUTING.md", "lab/*.md", "lab/journal/*", "examples/*/*", "deployments/data/*.proto")
LEVELS = ("info", "warning", "error", "exception", "critical")


# -- the command line ------------------------------------------------------------------------------------------------


def commands_page() -> str:
    """Return every verb with what it does, an example and its options."""
    from tenuto.cli import GROUPS, load_verb

    lines = ["# Commands", "", "Made of `tenuto VERB --help`. Every verb has `-h`, `--help`.", ""]
    for group, verbs in GROUPS.items():
        lines += [f"## {group}", ""]
        for verb in verbs:
            lines += _command(f"tenuto {verb}", load_verb(verb), 3)
    return "\n".join(lines)


def _command(name: str, command: click.Command | None, depth: int) -> Iterator[str]:
    assert command is not None, name
    context = click.Context(command, info_name=name)
    yield from (f"{'#' * depth} {name}", "")
    said, _, example = inspect.cleandoc(command.help or "").rpartition("Example: ")
    yield from (said.replace("\b\n", "").strip(), "")
    yield from ("```bash", example.strip(), "```", "")
    usage = " ".join(command.collect_usage_pieces(context))
    yield from (f"Usage: `{name} {usage}`", "")
    shown = [option for option in command.params if isinstance(option, click.Option) and not option.hidden]
    if shown:
        yield from _table(("option", "default", "meaning"), (_option(option, context) for option in shown))
    if isinstance(command, click.Group):
        for part, below in command.commands.items():
            yield from _command(f"{name} {part}", below, depth + 1)


def _option(option: click.Option, context: click.Context) -> tuple[str, str, str]:
    names = ", ".join(f"`{name}`" for name in (*option.opts, *option.secondary_opts) if name != "--help")
    value = "" if option.is_flag or option.count else f" `{option.make_metavar(context)}`"
    default = option.get_default(context, call=False)
    if isinstance(option.show_default, str):
        default = option.show_default
    elif callable(default) or default in (None, False, (), "") or "unset" in str(default).lower():
        default = ""
    help_ = (option.help or "") + (" Required." if option.required else "")
    return names + value, f"`{default}`" if default != "" else "", help_


# -- files -----------------------------------------------------------------------------------------------------------


def result_page() -> str:
    """Return every key of a result, with its type."""
    lines = [
        "# Keys of a result",
        "",
        "`result.json` of `tenuto simulate -o`, made of a short run. `tenuto bench -o` writes the same, and what only",
        "a real run has. [What is measured](metrics.md) defines the figures.",
        "",
        *_table(("key", "type"), ((f"`{key}`", kind) for key, kind in _result().items())),
    ]
    return "\n".join(lines)


def _result() -> dict[str, str]:
    """Return the keys of a result, each with its type, by making one: only the code that writes it has them."""
    from tenuto.cli import root

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "w.yaml").write_text("models: [{name: resnet50, rate_rps: 100, slo_ms: 200}]\n", encoding="utf-8")
        words = ["simulate", f"{folder}/w.yaml", "--gpus", "v100:1", "--duration-s", "2", "-o", f"{folder}/run"]
        CliRunner().invoke(root, words, catch_exceptions=False, standalone_mode=False)
        return dict(_flat(json.loads(Path(folder, "run", "result.json").read_text(encoding="utf-8"))))


def _flat(document: dict[str, Any], before: str = "") -> Iterator[tuple[str, str]]:
    kinds = {bool: "true or false", int: "whole number", float: "number", str: "text", list: "list", dict: "mapping"}
    for key, value in document.items():
        key = {"resnet50": "MODEL", "n0/0/a": "GPULET"}.get(key, key)
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{before}{key}.")
        else:
            yield before + key, kinds.get(type(value), "null where not known")


# -- Python ----------------------------------------------------------------------------------------------------------


def names_page() -> str:
    """Return what `import tenuto` offers."""
    lines = [
        "# Python names",
        "",
        "Made of the docstrings of what `import tenuto` offers. [Python](python.md) has examples.",
        "",
    ]
    for name in tenuto.__all__:
        thing = getattr(tenuto, name)
        lines += [f"## {name}", ""]
        lines += [f"```python\n{_signature(name, thing)}\n```", ""] if inspect.isfunction(thing) else []
        lines += [_plain(inspect.getdoc(thing) or ""), ""]
        if not inspect.isclass(thing):
            continue
        if issubclass(thing, BaseModel):
            page = {"Profile": "profile-file.md", "Plan": "plan-file.md"}.get(name, f"files.md#{name.lower()}")
            lines += [f"Its keys: [{name}]({page}).", ""]
        for part, made in [*vars(thing).items()]:  # a schema that is built meanwhile adds to them
            given = getattr(made, "__func__", getattr(made, "fget", made))
            if part.startswith("_") or not inspect.isfunction(given) or not given.__doc__:
                continue
            shown = f"{name}.{part}" if isinstance(made, property) else _signature(f"{name}.{part}", given)
            lines += [f"### {name}.{part}", "", f"```python\n{shown}\n```", "", _plain(inspect.getdoc(given) or ""), ""]
    return "\n".join(lines)


def _signature(name: str, thing: Any) -> str:
    signature = re.sub(r"(?<=[( ,])(?:self|cls)(?:, )?(?=[^=:])", "", str(inspect.signature(thing)), count=1)
    return re.sub(r" at 0x[0-9a-f]+", "", f"{name}{signature}".replace("'", ""))


def _plain(text: str) -> str:
    """A docstring as Markdown: what it says of arguments and errors becomes a list."""
    text = inspect.cleandoc(text)
    head, *parts = re.split(r"^(Args|Raises|Returns|Yields|Options|Example):\n", text, flags=re.M)
    lines = [head.strip()]
    for title, body in zip(parts[::2], parts[1::2], strict=True):
        entries = re.split(r"\n(?=\S)", inspect.cleandoc(body).strip())
        lines += ["", f"**{title}**", ""]
        lines += [f"- {' '.join(entry.split())}" for entry in entries]
    text = re.sub(r"<(?=\w)", "&lt;", "\n".join(lines))
    return re.sub(r"docs/reference/([\w-]+)\.md", r"[\1](\1.md)", text)


# -- policies and schedulers -----------------------------------------------------------------------------------------


def policies_page() -> str:
    """Return our policies and schedulers with their options."""
    from tenuto.batching.registry import SCHEDULERS, scheduler_class
    from tenuto.placement import policy_names

    lines = [
        "# Policies and schedulers",
        "",
        "Made of their docstrings. `tenuto policies` lists those that are installed; `--option K=V` sets an option.",
        "",
        "## Policies",
        "",
    ]
    ours = {name: kind for name, kind in policy_names().items() if kind.__module__.startswith("tenuto.")}
    for name, kind in ours.items():
        summary = kind.summary[:1].upper() + kind.summary[1:]
        lines += [f"### {name}", "", f"{summary}. Source: {_plain(kind.source)}.", "", _plain(kind.__doc__ or ""), ""]
        if "Options:" not in (kind.__doc__ or ""):
            told = next((base.__doc__ for base in kind.__mro__ if "Options:" in (base.__doc__ or "")), "")
            lines += [_plain(f"Options:\n{told.partition('Options:')[2]}") if told else "", ""]
    lines += ["## Schedulers", ""]
    for name in SCHEDULERS:
        kind = scheduler_class(name)
        lines += [f"### {name}", "", _plain(inspect.getdoc(kind) or ""), ""]
        lines += [_plain(inspect.getdoc(kind.options_type) or ""), ""]
    return "\n".join(lines)


# -- metrics and log lines -------------------------------------------------------------------------------------------


def metrics_page() -> str:
    """Return the metrics that a server writes, with their labels."""
    from tenuto.deployments.operator.exposition import render_metrics

    sys.path.insert(0, str(ROOT))  # mkdocs takes away what a hook inserts while it is loaded
    from tests.instruments.shown_status import ShownServer

    server = ShownServer(models=2, gpulets=8)
    for _ in range(3):
        server.second()
    text = render_metrics(server.status())
    kinds = dict(re.findall(r"^# TYPE (\S+) (\w+)$", text, re.M))
    rows = []
    for name, meaning in re.findall(r"^# HELP (\S+) (.*)$", text, re.M):
        series = re.findall(rf"^{name}(?:_bucket)?{{([^}}]*)}}", text, re.M)
        labels = {label for found in series for label in re.findall(r'(\w+)="', found)} - {"le"}
        rows.append((f"`{name}`", kinds[name], ", ".join(sorted(labels)), meaning))
    lines = [
        NO_CONTENTS,
        "# Metrics",
        "",
        "Made of what `GET /metrics` on the [operators' port](watching.md#what-it-says-of-itself) writes. Units are",
        "seconds, bytes, and ratios of 1. A metric whose value is not known is left out.",
        "",
        *_table(("metric", "kind", "labels", "meaning"), rows),
    ]
    return "\n".join(lines)


def log_page() -> str:
    """Return what loggers may say."""
    rows = []
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            for level, said in _logged(ast.parse(path.read_text(encoding="utf-8"))):
                rows.append((level, f"`{said}`", f"`{path.relative_to(ROOT)}`"))
    lines = [
        NO_CONTENTS,
        "# Log lines",
        "",
        "Made of the calls of loggers in the code; `%s` and `{…}` stand for what differs from line to line.",
        "`tenuto logs` shows the lines of a running deployment, `--log-json` makes them JSON. Nothing is written for",
        "each request above level debug.",
        "",
        *_table(("level", "line", "where"), rows),
    ]
    return "\n".join(lines)


def _logged(tree: ast.AST) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in LEVELS):
            continue
        if "logger" in ast.unparse(node.func.value) and node.args:
            said = node.args[0]
            text = said.value if isinstance(said, ast.Constant) else ast.unparse(said).removeprefix("f")
            if isinstance(said, ast.Constant | ast.JoinedStr) and text != "%s":
                yield node.func.attr, " ".join(str(text).strip("'\"").split())


MADE = {
    "reference/commands.md": commands_page,
    "reference/result-keys.md": result_page,
    "reference/python-names.md": names_page,
    "reference/policies.md": policies_page,
    "reference/metric-names.md": metrics_page,
    "reference/log-lines.md": log_page,
}
"""The pages that are made of the code, by their place below docs/."""


# -- mkdocs ----------------------------------------------------------------------------------------------------------


NO_CONTENTS = "---\nhide: [toc]\n---\n"  # room for wide tables


def _table(heads: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    yield f"| {' | '.join(heads)} |"
    yield f"|{'---|' * len(heads)}"
    for row in rows:
        yield f"| {' | '.join(' '.join(cell.split()).replace('|', chr(92) + '|') for cell in row)} |"
    yield ""


def on_config(config: Any) -> Any:
    """Make the navigation of the index, which links every page: what is on the one is on the other."""
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    guide = re.findall(r"^\d+\. \[.*?\]\((.*?)\)", index, re.M)
    sections = [
        {title[0].upper() + title[1:]: [{name[0].upper() + name[1:]: page} for name, page in pages]}
        for title, links in re.findall(r"^\| ([^|]+) \| (\[[^|]*) \|$", index, re.M)
        if (pages := re.findall(r"\[([^\]]*)\]\((reference/[^)#]*)\)", links))
    ]
    laboratory = [
        "lab/README.md",
        *(str(page.relative_to(ROOT)) for page in sorted(ROOT.glob("lab/*.md")) if page.stem != "README"),
    ]
    journal = sorted(str(page.relative_to(ROOT)) for page in ROOT.glob("lab/journal/*.md"))
    config.nav = [
        {"Start": "README.md"},
        {"Guide": guide},
        {"Reference": sections},
        {"Laboratory": [*laboratory, {"Journal": journal}]},
        {"Project": ["CHANGELOG.md", "CONTRIBUTING.md", "examples/real/README.md", "examples/applications/README.md"]},
    ]
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that are made, and those from outside docs/."""
    from mkdocs.structure.files import File

    for place, made in MADE.items():
        files.append(File.generated(config, place, content=made()))
    for path in sorted(path for pattern in ALSO for path in ROOT.glob(pattern) if path.is_file()):
        files.append(File.generated(config, str(path.relative_to(ROOT)), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, files: Any, **_: Any) -> str:
    """Turn links that are right in the repository into links that are right on the site."""
    place = page.file.src_uri
    folder = Path("" if any(Path(place).match(pattern) for pattern in ALSO) else "docs", place).parent

    def led(found: re.Match[str]) -> str:
        path, hash_, anchor = found[2].partition("#")
        if "://" in path or not path:
            return found[0]
        target = os.path.normpath(folder / path)
        there = os.path.relpath(target, "docs") if target.startswith("docs/") else target
        if files.get_file_from_path(there) is None and (ROOT / target).exists():
            return f"{found[1]} (`{target}`)"  # in the repository, and no page
        return f"[{found[1]}]({os.path.relpath(there, Path(place).parent)}{hash_}{anchor})"

    return re.sub(r"\[([^\]]*)\]\(([^)\s]+)\)", led, markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Take away what Markdown leaves of a bar in a table's code."""
    return re.sub(r"<code>[^<]*</code>", lambda code: code[0].replace("\\|", "|"), html)
