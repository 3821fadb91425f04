"""What a placement policy is, and how to get one by name."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from tenuto.errors import InvalidInputError, Problem, raise_if_any, refused
from tenuto.options import options_of_call, options_of_dataclass, read_options
from tenuto.placement.cluster import Cluster
from tenuto.placement.plan import Plan
from tenuto.placement.watch import PlanningWatch
from tenuto.placement.workload import Objective, Workload
from tenuto.plugins import POLICIES, cure_of_unknown, entry_point, registered
from tenuto.profiles import Profiles

DEFAULT_POLICY = "tenuto"  # the policy that plans when none is named


class Policy(ABC):
    """Makes a plan from a workload, a cluster and profiles. A policy only decides; `solve` completes and checks plans.

    A policy never changes its arguments, and makes the same plan for the same arguments. Its options are keyword-only
    parameters of `__init__` with defaults; `--option k=v` sets them by name. Tenuto's own policies are dataclasses:
    their fields are the options, each with its bounds (`tenuto.options.option`).
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    source: ClassVar[str]
    readings: ClassVar[str] = ""  # a line for `tenuto policies`: what its source leaves open, or what differs from it
    objectives: ClassVar[tuple[Objective, ...]] = ("total",)  # objectives that it plans for; plans note any other
    is_tried: ClassVar[bool] = False  # whether it tries its plans; they then promise no more than the trials served
    is_interruptible: ClassVar[bool] = False  # whether it reports progress, and can stop with the best plan so far
    watch: PlanningWatch = PlanningWatch()

    def __post_init__(self) -> None:
        """Check the options of a dataclass; raises `InvalidInputError` with all that are out of their bounds."""
        options = options_of_dataclass(type(self))
        given = {option.name: getattr(self, option.name) for option in options}
        problems = [*self._problems()]
        try:
            vars(self).update(read_options(f"policy '{self.name}'", options, given))
        except InvalidInputError as error:
            problems += error.problems
        raise_if_any(problems)

    def _problems(self) -> Iterable[Problem]:
        """Return problems of the options that their bounds do not exclude."""
        return ()

    @abstractmethod
    def place(self, workload: Workload, cluster: Cluster, profiles: Profiles) -> Plan:
        """Return the plan. A model that fits nowhere must be in `unserved`, with the reason."""

    @property
    def options(self) -> dict[str, Any]:
        """The options of this policy, which the plan records."""
        parameters = inspect.signature(type(self).__init__).parameters
        return {
            name: getattr(self, name)
            for name, parameter in parameters.items()
            if parameter.kind is inspect.Parameter.KEYWORD_ONLY and getattr(self, name) != parameter.default
        }


def policy_names() -> dict[str, type[Policy]]:
    """Return every policy by name: the entry points of all installed packages, including Tenuto's own."""
    return {name: point.load() for name, point in registered(POLICIES).items()}


def load_policy(name: str, options: Mapping[str, Any] | None = None) -> Policy:
    """Return a policy by its entry-point name, or from a module (`package.module:Class`) or a file (`path.py:Class`).

    Raises:
        InvalidInputError: unknown name, module, file, class or option; the message lists the known ones.
    """
    kind = _from_module(name) if ":" in name else _from_entry_point(name)
    return _configured(kind, name, dict(options or {}))


def _from_entry_point(name: str) -> type[Policy]:
    try:
        point = entry_point(POLICIES, name)
    except KeyError:
        cure = cure_of_unknown(POLICIES, name, registered(POLICIES))
        raise refused("--policy", name, "unknown policy", cure) from None
    kind: type[Policy] = point.load()
    return kind


def _from_module(name: str) -> type[Policy]:
    path, _, attribute = name.rpartition(":")
    file = Path(path)
    is_module = not path.endswith(".py") and all(part.isidentifier() for part in path.split("."))
    if not is_module and not file.is_file():
        cure = "Give it as path/to/file.py:ClassName, or as package.module:ClassName."
        raise refused("--policy", name, "no such file", cure)
    if is_module and str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))  # as `python -m` does, and as for models
    spec = None if is_module else importlib.util.spec_from_file_location(file.stem, file)
    if not is_module and (spec is None or spec.loader is None):
        raise refused("--policy", name, "is not a Python file", "Give it as path/to/file.py:ClassName.")
    try:
        if spec is None or spec.loader is None:
            module = importlib.import_module(path)
        else:
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
    except Exception as error:
        rule, cure = f"importing it failed: {type(error).__name__}: {error}", "Repair it, or start where it lies."
        raise refused("--policy", name, rule, cure) from error
    kind: type[Policy] | None = getattr(module, attribute, None)
    if not kind or not (inspect.isclass(kind) and callable(getattr(kind, "place", None))):
        raise refused(
            "--policy",
            name,
            f"'{attribute}' is not a class with a place() method in {path}",
            "Derive it from tenuto.placement.Policy.",
        )
    return kind


def _configured(kind: type[Policy], name: str, options: dict[str, Any]) -> Policy:
    return kind(**read_options(f"policy '{name}'", options_of_call(kind), options))
