"""The documents: links lead somewhere, every page is in the index, commands exist, and the quick ones work."""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib.util
import io
import itertools
import re
import shlex
import subprocess
import sys
import typing
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from pydantic import BaseModel

from tenuto.batching.planning import losses, plan_search
from tenuto.cli import load_verb, main, verb_names
from tenuto.deployments.control.settings import ControlSettings
from tenuto.documents import StrictModel, parse_document
from tenuto.files import parse_yaml
from tenuto.placement import Cluster, Plan, Workload
from tenuto.profiles import Profile
from tenuto.profiles.networks.catalogue import CATALOGUE
from tenuto.profiles.shipped import load_shipped
from tests.instruments.scenario import Scenario

ROOT = Path(__file__).parents[1]
PAGES = {
    str(path.relative_to(ROOT)): path
    for path in (*ROOT.glob("*.md"), *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "lab").rglob("*.md")))
}
GUIDE = sorted(page for page in PAGES if page.startswith("docs/guide/"))
# What takes seconds and needs neither Ray nor a GPU nor a network; `tenuto` as a policy tries plans for longer.
OURS = ("tenuto", "tenuto_lab", "tests", "lab")  # top packages of this repository
QUICK = ("plan", "simulate", "goodput", "capacity", "policies", "profiles")
LONG = ("--policy tenuto", "http://", "--elastic", "--compare tenuto")
# Pages whose commands take longest: what they print is compared at night; that they work is tried every day.
LONG_PAGES = tuple(f"docs/guide/{name}.md" for name in ("ten-models", "generating", "several-models"))
MADE_BEFORE = ("cpu.yaml", "more.yaml", "one-each")  # what a page measures, installs, or makes with others' commands


def blocks(text: str, *languages: str) -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```", text, re.M | re.S)
    return [block for language, block in found if language in languages]


def shell_lines(text: str) -> Iterator[str]:
    """What a reader would type: lines of blocks, without prompts and remarks, and commands within sentences."""
    typed = [line for block in blocks(text, "bash", "") for line in block.replace("\\\n", " ").splitlines()]
    typed += [line for block in blocks(text, "console") for line in block.splitlines() if line.startswith("$ ")]
    for line in typed:
        yield from re.split(r"\s+&&\s+", re.sub(r"\s+#.*", "", line.strip().removeprefix("$ ")))
    prose = re.sub(r"```.*?```", "", text, flags=re.S)
    yield from (" ".join(span.split()) for span in re.findall(r"`([^`]+)`", prose))


def commands(text: str) -> list[list[str]]:
    """The words behind `tenuto` of every command."""
    found = []
    for line in shell_lines(text):
        if re.match(r"tenuto [a-z]", line):
            found.append(shlex.split(line.partition(" > ")[0])[1:])
    return found


@functools.cache
def made_pages() -> frozenset[Path]:
    """Where pages that `scripts/site` makes of the code would lie."""
    spec = importlib.util.spec_from_file_location("site_pages", ROOT / "scripts" / "site_pages.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return frozenset(ROOT / "docs" / place for place in module.MADE)


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    text = PAGES[page].read_text(encoding="utf-8")
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, anchor = target.partition("#")
        if "://" in target:
            continue
        file = (PAGES[page].parent / path).resolve() if path else PAGES[page]
        if file in made_pages():
            continue  # what leads there is tried where the site is built
        if not file.exists():
            broken.append(target)
        elif anchor:
            heads = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), re.M)
            known = {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}
            broken += [target] if anchor not in known else []
    assert broken == []


@pytest.mark.parametrize("folder", ["docs", "lab/journal"])
def test_every_page_is_in_the_index(folder: str) -> None:
    index = (ROOT / folder / "README.md").read_text(encoding="utf-8")
    linked = set(re.findall(r"\]\(((?:\w+/)?[\w-]+\.md)\)", index))
    linked -= {str(path.relative_to(ROOT / folder)) for path in made_pages() if path.is_relative_to(ROOT / folder)}
    assert linked == {str(path.relative_to(ROOT / folder)) for path in (ROOT / folder).rglob("*.md")} - {"README.md"}


@pytest.mark.parametrize("page", PAGES)
def test_commands_options_and_scripts_exist(page: str) -> None:
    text = PAGES[page].read_text(encoding="utf-8")
    unknown = []
    for verb, *words in commands(text):
        command = load_verb(verb)
        if isinstance(command, click.Group) and words:
            command = command.commands.get(words[0], command)
        if command is None:
            unknown.append(verb)
            continue
        options = {name for option in command.params for name in (*option.opts, *option.secondary_opts)} | {"--help"}
        given = [word.split("=")[0] for word in words if re.match(r"-[-a-z]", word)]
        unknown += [f"{verb} {word}" for word in given if word not in options]
    for script in re.findall(r"(?:python |`)((?:tests|lab|scripts)/[\w/.]+)", text):
        unknown += [script] if not (ROOT / script).exists() else []
    assert unknown == []


def benchmark_source(name: str) -> str:
    """The text of a script in lab/benchmarks and of what it imports from there."""
    folder = ROOT / "lab" / "benchmarks"
    text = (folder / f"{name}.py").read_text(encoding="utf-8")
    others = re.findall(r"^(?:from|import) (?:lab\.benchmarks\.)?(\w+)", text, re.M)
    return text + "".join(benchmark_source(other) for other in others if (folder / f"{other}.py").exists())


@pytest.mark.parametrize("page", PAGES)
def test_benchmarks_have_the_options_that_are_named(page: str) -> None:
    unknown = []
    for line in shell_lines(PAGES[page].read_text(encoding="utf-8")):
        if named := re.search(r"\b((?:bench|walk|picture|ask)_\w+)(?:\.py)?\b(.*)", line):
            source = benchmark_source(named[1])
            options = re.findall(r"(?<!\S)\[?(--[a-z-]+)", named[2])
            unknown += [f"{named[1]} {option}" for option in options if f'"{option}"' not in source]
    assert unknown == []


def imported(block: str) -> Iterator[tuple[str, str]]:
    """Modules of ours that Python imports, each with a name it takes from there."""
    for node in ast.walk(ast.parse(block)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in OURS:
            yield from ((str(node.module), alias.name) for alias in node.names)


@functools.cache
def text_of(module: str) -> str:
    """The text of a module of ours; empty where there is none."""
    path = ROOT / ("lab" if module.startswith("tenuto_lab") else "") / module.replace(".", "/")
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return file.read_text(encoding="utf-8") if file.exists() else ""


def is_there(module: str, name: str) -> bool:
    """Whether a module has a name, by its text: importing Ray and torch for it takes seconds."""
    defined = rf"^(?:async )?(?:def|class) {name}\b|^{name}\b.*=|^(?: +|from .* import .*|import .*)\b{name}\b,?"
    return bool(text_of(f"{module}.{name}") or re.search(defined, text_of(module), re.M))


def test_python_of_the_pages_imports_what_exists() -> None:
    written = [block for path in PAGES.values() for block in blocks(path.read_text(encoding="utf-8"), "python")]
    assert [found for block in written for found in imported(block) if not is_there(*found)] == []


INSTALLED = {"numpy", "torch", "ray"}  # what every page may import, as `tenuto[serve]` brings it


@pytest.mark.parametrize("page", [page for page, path in PAGES.items() if "```python" in path.read_text("utf-8")])
def test_pages_name_the_packages_that_their_python_needs(page: str) -> None:
    text = PAGES[page].read_text(encoding="utf-8")
    known = {*sys.stdlib_module_names, *OURS, *INSTALLED, *re.findall(r"pip install '?([\w-]+)", text)}
    needed = set()
    for node in (node for block in blocks(text, "python") for node in ast.walk(ast.parse(block))):
        if isinstance(node, ast.Import):
            needed |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            needed.add(str(node.module).split(".")[0])
    assert needed - known == set()


@pytest.mark.parametrize("script", sorted(path.stem for path in (ROOT / "lab" / "benchmarks").glob("*.py")))
def test_benchmarks_import_what_exists(script: str) -> None:
    source = (ROOT / "lab" / "benchmarks" / f"{script}.py").read_text(encoding="utf-8")
    assert [found for found in imported(source) if not is_there(*found)] == []
    before, needs_tests, _ = source.partition("\nfrom tests.")  # which an installed Tenuto does not bring
    assert not needs_tests or "sys.path.insert" in before or f"python -m lab.benchmarks.{script}" in source


# A key that tells what a file is, and its schema; files of others (Prometheus) and of measurements have none of these.
SCHEMAS: tuple[tuple[str, type[StrictModel]], ...] = (
    ("arrivals", Scenario),
    ("policy", Plan),
    ("gpu_type", Profile),
    ("nodes", Cluster),
    ("models", Workload),
    ("applications", Workload),
)


@pytest.mark.parametrize("page", [page for page, path in PAGES.items() if "```yaml" in path.read_text("utf-8")])
def test_files_on_the_pages_are_read(page: str) -> None:
    for block in blocks(PAGES[page].read_text(encoding="utf-8"), "yaml"):
        data = parse_yaml(block)
        schema = ControlSettings if "mode" in data else next((kind for key, kind in SCHEMAS if key in data), None)
        if schema is not None:
            parse_document(schema, data, origin=page)


@pytest.mark.parametrize("page", [page for page, path in PAGES.items() if ".infer(" in path.read_text("utf-8")])
def test_inputs_that_are_sent_are_those_of_the_catalogue(page: str) -> None:
    text = PAGES[page].read_text(encoding="utf-8")
    for model, given in re.findall(r"\.infer\(\"(\w+)\", {\"(\w+)\":", text):
        assert given in [tensor.name for tensor in CATALOGUE[model].signature.inputs]


@pytest.mark.parametrize(
    ("page", "section", "schema"),
    [
        ("files", "Workload", Workload),
        ("files", "Cluster", Cluster),
        ("profile-file", "", Profile),
        ("plan-file", "", Plan),
        ("control", "", ControlSettings),
    ],
)
def test_every_key_of_a_file_is_explained(page: str, section: str, schema: type[StrictModel]) -> None:
    """A plan holds entries of the workload, which its section does not explain again. What only models that generate
    have stands on their page."""
    text = PAGES[f"docs/reference/{page}.md"].read_text(encoding="utf-8")
    text = text.partition(f"\n## {section}\n")[2].partition("\n## ")[0] if section else text
    explained = re.findall(r"\w+", text + PAGES["docs/reference/generating.md"].read_text(encoding="utf-8"))
    elsewhere = set() if schema is Workload else schemas_below(Workload)
    keys = {
        field.alias or name for model in schemas_below(schema) - elsewhere for name, field in model.model_fields.items()
    }
    assert keys - set(explained) == set()


def schemas_below(schema: type[BaseModel]) -> set[type[BaseModel]]:
    """A schema, and those of all that its fields hold."""
    found, waiting = {schema}, [field.annotation for field in schema.model_fields.values()]
    while waiting:
        annotation = waiting.pop()
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            waiting += [field.annotation for field in annotation.model_fields.values() if annotation not in found]
            found.add(annotation)
        waiting += typing.get_args(annotation)
    return found


def quick_pages() -> list[str]:
    """Pages with a command that is tried."""
    return [page for page, path in PAGES.items() if quick_commands(path.read_text(encoding="utf-8"))]


def quick_commands(text: str) -> list[list[str]]:
    found = [words for block in blocks(text, "bash", "") for words in commands(f"```\n{block}```\n")]
    return [words for words in found if words[0] in QUICK and not any(part in shlex.join(words) for part in LONG)]


@pytest.mark.parametrize("page", quick_pages())
def test_quick_commands_work_in_order(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the page's own workload where it has one, the README's otherwise, and the files that are named. Whether
    commands work takes no long trials; what they print is compared where the guide shows it."""
    text = PAGES[page].read_text(encoding="utf-8")
    for module in (plan_search, losses):
        monkeypatch.setattr(module, "CONFIRMING", 1)
    readme = PAGES["README.md"].read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    write_files_of(text, readme)
    gpus = [{"type": "v100", "count": 2}]
    nodes = [{"name": name, "label": f"tenuto-node={name}", "gpus": gpus} for name in ("n0", "n1")]
    Path("cluster.yaml").write_text(Cluster.model_validate({"nodes": nodes}).dump(), encoding="utf-8")
    Path("profile.yaml").write_text(load_shipped("thesis-v100").dump(), encoding="utf-8")
    if not any("plan.yaml" in words for words in quick_commands(text) if words[0] == "plan"):
        run("plan", "workload.yaml", "--policy", "gpulet", "--gpus", "v100:4", "-o", "plan.yaml")
    for words in quick_commands(text):
        if not any(name in words for name in MADE_BEFORE):
            is_run = words[0] in ("simulate", "goodput", "capacity") and "--duration-s" not in words
            run(*words, *(("--duration-s", "2") if is_run else ()))


def write_files_of(text: str, fallback: str) -> None:
    """Write the files that a page shows by name; the workload of another page where it has none."""
    shown = [*blocks(fallback, "yaml", "python"), *blocks(text, "yaml", "python")]
    for block in shown:
        if named := re.match(r"# (workload\.yaml|my_\w+\.py)\n", block):
            Path(named[1]).write_text(block, encoding="utf-8")


def test_the_hooks_of_the_guide_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the guide's own model behind them, in a process of its own, which imports both."""
    text = PAGES["docs/guide/your-model.md"].read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    write_files_of(text, "")
    program = (
        "import torch, my_model, my_hooks\n"
        "from tenuto.profiles.networks.hooks import answer_json, load_hooks, made_inputs, try_hooks\n"
        "model = my_model.scorer(width=64)\n"
        "def run(inputs):\n"
        "    with torch.inference_mode():\n"
        "        return {'scores': model.module(torch.from_numpy(inputs['features'])).numpy()}\n"
        "try_hooks('my_hooks:Row', model.signature, run)\n"
        "hooks = load_hooks('my_hooks:Row', model.signature)\n"
        "made_inputs(model.signature, hooks.preprocess(b','.join([b'0.5'] * 64) + b'\\n'))\n"
        "print(answer_json(hooks.postprocess({'scores': [0.3, 0.1]})).decode())\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert f'"prediction":{done.stdout.strip()}' in text


def run(*words: str) -> str:
    """Run a command, which must work, and return what a terminal would show."""
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(shown), pytest.raises(SystemExit) as ended:
        main(list(words))
    assert ended.value.code == 0, f"tenuto {shlex.join(words)}: {shown.getvalue()}"
    assert shown.getvalue()
    return shown.getvalue()


def sessions(text: str) -> Iterator[tuple[list[str], list[str]]]:
    """Quick commands of what a page shows of a terminal, each with the lines below it."""
    for block in blocks(text, "console"):
        for shown in re.split(r"^\$ ", block, flags=re.M)[1:]:
            command, *lines = shown.splitlines()
            is_quick = re.match(rf"tenuto ({'|'.join(QUICK)})\b", command) and not any(x in command for x in LONG)
            if is_quick and not any(file in command for file in MADE_BEFORE):
                yield shlex.split(command)[1:], lines


def _told(line: str) -> str:
    """A line without what differs from run to run: the layout, and how long it took."""
    return re.sub(r"in [\d.]+ s$", "in a while", " ".join(line.split()))


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=[pytest.mark.night] if page in LONG_PAGES else [])
        for page in GUIDE
        if [*sessions(PAGES[page].read_text("utf-8"))]
    ],
)
def test_commands_of_the_guide_print_what_it_shows(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Line by line in order; `…` stands for lines that are left out."""
    monkeypatch.chdir(tmp_path)
    text = PAGES[page].read_text(encoding="utf-8")
    write_files_of(text, PAGES["docs/guide/ten-models.md"].read_text(encoding="utf-8"))
    for words, lines in sessions(text):
        printed = iter([_told(line) for line in run(*words).splitlines()])
        missing = [line for line in lines if line != "…" and _told(line) not in printed]
        assert missing == [], shlex.join(words)


@pytest.mark.parametrize("page", GUIDE)
def test_pages_of_the_guide_are_short_and_without_dated_figures(page: str) -> None:
    text = PAGES[page].read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 200
    assert re.findall(r"\b20\d\d-\d\d-\d\d\b", text) == []


@pytest.mark.parametrize("page", [page for page in PAGES if page.startswith("docs/")])
def test_lines_of_prose_fit_a_screen(page: str) -> None:
    prose = re.sub(r"^```.*?^```", "", PAGES[page].read_text(encoding="utf-8"), flags=re.M | re.S)
    assert [line for line in prose.splitlines() if len(line) > 160 and not line.startswith("|")] == []


@pytest.mark.parametrize("page", ["files", "operating", "serving", "generating"])
def test_pages_that_once_explained_everything_stay_lists(page: str) -> None:
    """What explains belongs to the guide or to a page of its own."""
    assert len(PAGES[f"docs/reference/{page}.md"].read_text(encoding="utf-8").split()) <= 2500


@pytest.mark.parametrize("page", [page for page in PAGES if not page.startswith("lab/journal/")])
def test_modules_that_are_named_exist(page: str) -> None:
    """The journal names what was there when its figures were measured."""
    named = set(re.findall(r"`([\w/]+\.py)\b", PAGES[page].read_text(encoding="utf-8")))
    assert {name for name in named if f"/{name}\n" not in module_files() and not name.startswith("my_")} == set()


@functools.cache
def module_files() -> str:
    """The path of every module, a line each."""
    folders = (
        "batching",
        "deployments",
        "lab",
        "loadgen",
        "mps",
        "placement",
        "profiles",
        "scripts",
        "tenuto",
        "tests",
    )
    return "".join(f"/{path.relative_to(ROOT)}\n" for folder in folders for path in (ROOT / folder).rglob("*.py"))


def test_every_page_of_the_guide_leads_to_the_next() -> None:
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    order = [f"docs/{place}" for place in re.findall(r"^\d+\. \[.*?\]\((guide/[\w-]+\.md)\)", index, re.M)]
    assert sorted(order) == GUIDE
    for page, after in itertools.pairwise(order):
        assert re.search(rf"^Next: \[.*\]\({Path(after).name}\)\.$", PAGES[page].read_text(encoding="utf-8"), re.M), (
            page
        )


def test_terms_are_in_the_word_list() -> None:
    """A page prints a term in bold, and small, where it first uses it."""
    rows = re.findall(r"^\| ([^|]+) \|", PAGES["docs/reference/concepts.md"].read_text(encoding="utf-8"), re.M)
    words = {word for row in rows for word in re.sub(r" \(.*\)", "", row).split(", ")}
    used = {
        (page, term)
        for page, path in PAGES.items()
        if page.startswith("docs/")
        for term in re.findall(r"\*\*([a-z][^*]*)\*\*", path.read_text(encoding="utf-8"))
    }
    assert {(page, term) for page, term in used if term.removesuffix("s") not in words} == set()


@pytest.mark.parametrize("verb", verb_names())
def test_help_begins_with_a_sentence_and_ends_with_an_example(verb: str) -> None:
    command = load_verb(verb)
    assert isinstance(command, click.Command)
    lines = [line.strip() for line in (command.help or "").strip().splitlines() if line.strip()]
    first = " ".join((command.help or "").strip().split("\n\n")[0].split())
    assert re.match(r"[A-Z].*\.$", first), first
    assert first.count(". ") == 0, first
    assert re.match(rf"Example: tenuto {verb}\b", lines[-1]), lines[-1]
    assert not command.get_short_help_str(limit=100).endswith("..."), "cut in the list of commands: give a short_help"
    if isinstance(command, click.Group):
        for name, part in command.commands.items():
            assert f"Example: tenuto {verb} {name}" in (part.help or ""), name
        return
    assert {"--json"} & {name for option in command.params for name in option.opts} or verb in WITHOUT_JSON


WITHOUT_JSON = {"serve"}  # it prints nothing but progress
