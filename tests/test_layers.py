"""Directions: left never imports right, rooms and files import one way, planning needs no serving library."""

import ast
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOUNDATION = ("documents", "errors", "files", "options", "outcome", "pages", "plugins")
ALLOWED = {
    "profiles": set(),
    "mps": {"profiles"},
    "placement": {"profiles"},
    "batching": {"profiles", "placement"},
    "deployments": {"profiles", "mps", "placement", "batching"},
    "loadgen": {"profiles", "placement", "batching", "deployments"},
}
SERVING_LIBRARIES = ("ray", "torch", "torchvision", "transformers", "pynvml", "fastapi", "sklearn", "PIL")
# What loads where none of these libraries is installed, and what in there is about torch itself.
WITHOUT_LIBRARIES = (
    *(f"tenuto.{folder}" for folder in ("profiles", "mps", "placement", "batching")),
    *(f"tenuto.loadgen.{name}" for name in ("schedule", "records", "verdict", "bench", "report")),
    "tenuto.deployments.serve.diff",
    *(f"tenuto.cli.{verb}" for verb in ("plan", "simulate", "goodput", "policies")),
)
WITH_TORCH = (
    "tenuto.profiles.networks.merging",
    "tenuto.profiles.networks.folding",
    "tenuto.profiles.networks.text_networks",
    "tenuto.profiles.networks.vision_networks",
    "tenuto.profiles.networks.language_model",
    "tenuto.profiles.networks.shaping",
    "tenuto.profiles.networks.vllm_model",
    "tenuto.profiles.measuring.merged_programs",
)
# Rooms in which whatever comes from another process, file or room is a type (`deployments/wire`), read by attribute.
TYPED_ROOMS = (
    "batching/core",
    *(f"deployments/{room}" for room in ["wire", "dispatch", "operator", "control", "entry", "gpulet"]),
)
# How often modules in there read formats of others by their keys. A module that reads fewer lowers its number.
FOREIGN_KEYS = {
    "deployments/entry/protocols/openai_bodies.py": 1,  # a type with one word
    "deployments/control/controller_process.py": 3,  # Serve's config, and what the planner plans with
    "deployments/control/operations.py": 3,  # what a launcher signed
    "deployments/control/settings.py": 1,  # a file before it is checked
    "deployments/entry/service/management.py": 5,  # ASGI
    "deployments/entry/protocols/grpc_calls.py": 1,  # the Open Inference Protocol
    "deployments/entry/protocols/grpc_messages.py": 5,  # the same
    "deployments/entry/protocols/oip_requests.py": 7,  # the same
    "deployments/entry/service/management_routes.py": 4,  # OpenAPI, ASGI
    "deployments/entry/protocols/texts.py": 3,  # files of tokenizers, and messages as chat templates take them
    "deployments/entry/service/traces.py": 2,  # OpenTelemetry
    "deployments/gpulet/executors/emulated.py": 1,  # options of a model of its user
    "deployments/gpulet/mps_sharing.py": 1,  # the environment of CUDA
    "deployments/gpulet/replica.py": 1,  # Serve's config
    "deployments/operator/app.py": 2,  # FastAPI
}
Place = tuple[str, ...]
"""Where a module lives: its path without the suffix, as folders and a name; a package is the place of its face."""


@cache
def _modules() -> dict[str, Path]:
    """Every module of the product by its import name, each read where it really is and not through a link."""
    found = {}
    for folder in (*ALLOWED, "tenuto"):
        for file in sorted((ROOT / folder).rglob("*.py")):
            inside = file.relative_to(ROOT)
            if folder == "tenuto" and (ROOT / "tenuto" / inside.parts[1]).is_symlink():
                continue
            parts = [*(() if folder == "tenuto" else ("tenuto",)), *inside.with_suffix("").parts]
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


@cache
def _imports(file: Path) -> frozenset[tuple[str, str]]:
    """What a file imports of the project, as (module, name); for type checking only and inside functions too."""
    found: set[tuple[str, str]] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: imports are absolute"
            found |= {(node.module or "", alias.name) for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {(alias.name, "") for alias in node.names}
    return frozenset(pair for pair in found if pair[0].split(".")[0] == "tenuto")


def _home(module: str, name: str) -> str:
    """The module that an import means: `from package import name` is looked up through the package's face."""
    modules = _modules()
    if f"{module}.{name}" in modules:
        return f"{module}.{name}"
    if modules[module].name == "__init__.py":
        behind = [again for again, its in _imports(modules[module]) if its == name]
        if behind:
            return _home(behind[0], name)
    return module


def _arrows() -> Iterator[tuple[str, str]]:
    for module, file in _modules().items():
        for imported, name in _imports(file):
            home = _home(imported, name)
            if home != module:
                yield module, home


def _place(module: str) -> Place:
    return _modules()[module].relative_to(ROOT).with_suffix("").parts


def _circles(arrows: dict[str, set[str]]) -> list[frozenset[str]]:
    """The groups of nodes that reach one another: those that both follow a node and lead to it."""

    def reached(start: str, step: dict[str, set[str]]) -> set[str]:
        seen, waiting = set(), [start]
        while waiting:
            for after in step.get(waiting.pop(), ()):
                if after not in seen:
                    seen.add(after)
                    waiting.append(after)
        return seen

    back = defaultdict(set)
    for before, afters in arrows.items():
        for after in afters:
            back[after].add(before)
    return sorted({frozenset(both) for node in arrows if node in (both := reached(node, arrows) & reached(node, back))})


@cache
def _arrows_by_folder() -> dict[Place, dict[tuple[str, str], str]]:
    """Per folder: which file or room in it imports which other, each with an import that does."""
    found: dict[Place, dict[tuple[str, str], str]] = defaultdict(dict)
    for module, home in sorted(_arrows()):
        here, there = _place(module), _place(home)
        depth = next(at for at, (one, other) in enumerate(zip(here, there, strict=False)) if one != other)
        if depth:
            found[here[:depth]].setdefault((here[depth], there[depth]), f"{module} imports {home}")
    return found


@cache
def _circles_of_the_house() -> dict[tuple[str, frozenset[str]], list[str]]:
    """Per folder: which of the files and rooms in it import one another in a circle, and through which imports."""
    inside: dict[Place, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for folder, arrows in _arrows_by_folder().items():
        for one, other in arrows:
            inside[folder][one].add(other)
    return {
        ("/".join(folder), circle): [
            why for (one, other), why in _arrows_by_folder()[folder].items() if {one, other} <= circle
        ]
        for folder, arrows in inside.items()
        for circle in _circles(arrows)
    }


@pytest.mark.parametrize("folder", ALLOWED)
def test_left_never_imports_right(folder: str) -> None:
    wrong = [
        f"{file.relative_to(ROOT)} imports {module}"
        for file in (ROOT / folder).rglob("*.py")
        for module, name in _imports(file)
        if (*module.split("."), name)[1] not in {folder, "__version__", "version", *FOUNDATION, *ALLOWED[folder]}
    ]
    assert wrong == []


def test_nothing_imports_the_laboratory() -> None:
    """By no import and by no name of a module: what the laboratory adds registers itself."""
    machine = [file for folder in (*ALLOWED, "tenuto") for file in (ROOT / folder).rglob("*.py")]
    assert [str(file.relative_to(ROOT)) for file in machine if "tenuto_lab" in file.read_text(encoding="utf-8")] == []


@pytest.mark.parametrize("name", FOUNDATION)
def test_the_foundation_imports_nothing_but_the_foundation(name: str) -> None:
    imported = {module.split(".")[1] for module, _ in _imports(_modules()[f"tenuto.{name}"])}
    assert imported <= set(FOUNDATION)


def test_rooms_and_files_of_a_folder_import_one_way() -> None:
    circles = [
        f"{folder}: {', '.join(sorted(circle))}: {'; '.join(why)}"
        for (folder, circle), why in _circles_of_the_house().items()
    ]
    assert circles == []


def _drawing(folder: str) -> list[str]:
    """The files and rooms of a folder as CONTRIBUTING draws them, from the top."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    (drawn,) = re.findall(rf"^```text\n{folder}/ .*\n((?:  .*\n)+)```$", text, re.M)
    return [line.split()[0].rstrip("/") for line in drawn.splitlines()]


@pytest.mark.parametrize("folder", [*ALLOWED, "placement/planner", "deployments/entry", "tenuto"])
def test_a_folders_drawing_is_complete_and_imports_upwards(folder: str) -> None:
    drawn, place = _drawing(folder), tuple(folder.split("/"))
    within = [each[len(place)] for each in map(_place, _modules()) if each[: len(place)] == place != each]
    assert sorted(drawn) == sorted(set(within) - {"__init__"})
    assert [
        why
        for (one, other), why in _arrows_by_folder()[place].items()
        if {one, other} <= set(drawn) and drawn.index(other) > drawn.index(one)
    ] == []


@cache
def _definitions(file: str) -> frozenset[str]:
    """The functions and classes of a file, and methods as `Class.method`; none where the file is missing."""
    if not (ROOT / file).is_file():
        return frozenset()
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    top = [node for node in ast.parse((ROOT / file).read_text(encoding="utf-8")).body if isinstance(node, kinds)]
    methods = {f"{owner.name}.{node.name}" for owner in top for node in owner.body if isinstance(node, kinds)}
    return frozenset({node.name for node in top} | methods)


def test_where_is_it_decided_names_functions_of_the_code() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    table = text.partition("\n## Where is it decided\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (?!question)(.+) \| (.+) \|$", table, re.M)
    assert len(rows) >= 30
    assert [question for question, where in rows if not re.fullmatch(r"(`[\w/]+\.py: [\w.]+`(, )?)+", where)] == []
    named = re.findall(r"`([\w/]+/\w+\.py): ([\w.]+)`", text)  # those of the other sections too
    assert [f"{file}: {name}" for file, name in named if name not in _definitions(file)] == []


@pytest.mark.parametrize("module", WITH_TORCH)
def test_modules_that_may_import_torch_exist(module: str) -> None:
    assert module in _modules()


def test_rooms_and_modules_that_rules_name_exist() -> None:
    assert [name for name in WITHOUT_LIBRARIES if not any(module.startswith(name) for module in _modules())] == []
    assert [room for room in TYPED_ROOMS if not (ROOT / room).is_dir()] == []


def test_planning_and_simulation_import_without_ray_torch_and_cuda() -> None:
    modules = [name for name in _modules() if name.startswith(WITHOUT_LIBRARIES) and not name.startswith(WITH_TORCH)]
    program = f"""
import importlib, sys
BLOCKED = {SERVING_LIBRARIES}
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in BLOCKED:
            raise ModuleNotFoundError(f"blocked: {{name}}", name=name)
sys.meta_path.insert(0, Block())
for module in {modules}:
    importlib.import_module(module)
from tenuto.placement import policy_names
assert "symphony" in policy_names()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False)
    assert (len(modules) > 150, done.returncode, done.stderr) == (True, 0, "")


def test_processes_of_ours_import_what_is_installed_before_what_lies_in_the_working_folder() -> None:
    """Python puts that folder first for `-m` and `-c`, so that a `numpy.py` there would be run."""
    started = [
        (str(file.relative_to(ROOT)), match[1])
        for folder in (*ALLOWED, "tenuto", "lab/tenuto_lab")
        for file in (ROOT / folder).rglob("*.py")
        for match in re.finditer(r"[\[(]\s*sys\.executable,\s*([^,\]]+)", file.read_text())
    ]
    assert len(started) > 5
    assert [each for each in started if each[1] != '"-P"'] == []


def _keys_read(file: Path) -> int:
    """How often a file reads by a key that is written there: `x["key"]`, or `x.get("key")` of no URL."""
    return sum(
        (isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load) and _is_key(node.slice))
        or (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "get"
            and bool(node.args)
            and _is_key(node.args[0])
        )
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
    )


def _is_key(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and not node.value.startswith("/")


def test_what_crosses_rooms_is_read_by_attribute() -> None:
    read = {
        str(file.relative_to(ROOT)): count
        for room in TYPED_ROOMS
        for file in sorted((ROOT / room).rglob("*.py"))
        if (count := _keys_read(file))
    }
    assert read == FOREIGN_KEYS


def test_what_the_wheel_compiles_is_there() -> None:
    (listed,) = (
        ast.literal_eval(node.value)
        for node in ast.parse((ROOT / "setup.py").read_text(encoding="utf-8")).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "COMPILED"
    )
    files = [ROOT / folder / f"{name}.py" for folder, names in listed.items() for name in names.split()]
    assert [str(file) for file in files if not file.is_file()] == []
