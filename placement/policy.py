"""What a placement policy is, and how to get one by name."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from tenuto.errors import InvalidInputError, Problem, raise_if_any, refused
from tenuto.options import options_of_call, options_of_dataclass, read_options
from tenuto.placement.cluster import Cluster
from tenuto.placement.generation_capacity import GeneratingHost, GeneratingPlan, carried
from tenuto.placement.plan import Plan
from tenuto.placement.watch import PlanningWatch
from tenuto.placement.workload import ModelSpec, Objective, Workload
from tenuto.plugins import POLICIES, cure_of_unknown, load_plugin, registered
from tenuto.profiles import Profiles, StepCost

DEFAULT_POLICY = "tenuto"  # the policy that plans when none is named


@dataclass(frozen=True)
class Abilities:
    """What a policy can do beside placing models of fixed cost.

    `objectives` are those that it plans for; a plan notes any other. `generation` is how it plans models that generate:
    not at all; by `shares`, which `Policy.carries` and `Policy.serves` judge; or `alone`, by `Policy.place_generating`,
    on a fixed cluster without other models. A policy that `tries_plans` promises no more than its trials served. One
    that `splits_deadlines` chooses how applications' deadlines are split, and returns a plan with them. One
    that `is_interruptible` reports its progress to its `watch`, and can stop with the best plan so far. Policy `tenuto`
    starts from the plan of a policy where a workload has at most `most_models`, and plans clusters that it may buy with
    one only if it `plans_at_once`, in much less than a second.
    """

    objectives: tuple[Objective, ...] = ("total",)
    generation: Literal["none", "shares", "alone"] = "none"
    tries_plans: bool = False
    splits_deadlines: bool = False
    is_interruptible: bool = False
    most_models: int | None = None
    plans_at_once: bool = True


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
    abilities: ClassVar[Abilities] = Abilities()
    compute_metric: str | None = None  # the metric that it reads as a model's compute requirement
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

    def place_generating(self, specs: Sequence[ModelSpec], cluster: Cluster, profiles: Profiles) -> GeneratingPlan:
        """Return the gpu-lets of models that generate; only asked of a policy that plans them `alone`.

        Raises:
            InvalidInputError: the policy does not plan them.
        """
        del cluster, profiles
        names = ", ".join(spec.name for spec in specs)
        raise refused("models", names, f"policy {self.name} does not plan models that generate", "Use --policy tenuto.")

    def carries(self, spec: ModelSpec, cost: StepCost, kv_tokens: int) -> tuple[float, int]:
        """Return how many requests per second steps of this cost carry of a model that generates, with memory for so
        many tokens, and with how many sequences. By default the closed form says it (`carried`)."""
        return carried(spec, cost, kv_tokens)

    def serves(self, spec: ModelSpec, hosts: Sequence[GeneratingHost]) -> float:
        """Return which part of its rate the gpu-lets of a model that generates serve together when it asks for more
        than they carry. By default 0: then what each carries by itself counts."""
        del spec, hosts
        return 0.0

    def for_worst_served(self) -> Policy:
        """Return the policy that compares plans by the model that is served worst, if it can; by default itself."""
        return self

    def for_parts_of(self, workload: Workload, cluster: Cluster) -> Policy:
        """Return the policy that judges plans on parts of a cluster as it judges those on all of it; by default
        itself."""
        del workload, cluster
        return self

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
    """Return every policy by name: the entry points of all installed packages, including Tenuto's own. One whose module
    is not there, as after half an upgrade, is left out."""
    names = {}
    for name in registered(POLICIES):
        with contextlib.suppress(KeyError):
            names[name] = load_plugin(POLICIES, name)
    return names


def load_policy(name: str, options: Mapping[str, Any] | None = None) -> Policy:
    """Return a policy by its entry-point name, or from a module (`package.module:Class`) or a file (`path.py:Class`).

    Raises:
        InvalidInputError: unknown name, module, file, class or option; the message lists the known ones.
    """
    kind = _from_module(name) if ":" in name else _from_entry_point(name)
    return _configured(kind, name, dict(options or {}))


def _from_entry_point(name: str) -> type[Policy]:
    try:
        kind: type[Policy] = load_plugin(POLICIES, name)
    except KeyError:
        cure = cure_of_unknown(POLICIES, name, policy_names())
        raise refused("--policy", name, "unknown policy", cure) from None
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
    kind = getattr(module, attribute, None)
    if not (inspect.isclass(kind) and issubclass(kind, Policy)):
        rule = f"'{attribute}' is not a policy in {path}"
        raise refused("--policy", name, rule, "Derive it from tenuto.placement.Policy, with a method place().")
    return kind


def _configured(kind: type[Policy], name: str, options: dict[str, Any]) -> Policy:
    return kind(**read_options(f"policy '{name}'", options_of_call(kind), options))
