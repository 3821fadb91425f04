"""What each fitted constant of the scheduler is worth: requests lost when it is halved and when it is doubled.

A constant is fitted if the comment behind it says so (`NAME = 0.5  # fitted: ...`); all others that steer are derived,
from a paper, or options. Each fitted one is halved and doubled over the same random scenarios (`regret_scenarios.py`),
and the change of the mean attainment is printed in points. A constant that changes less than half a point both ways can
be removed.

    python lab/benchmarks/bench_constants.py [--quick] [--count 30] [--seed 1] [--only NAME ...] [--list]
"""

from __future__ import annotations

import argparse
import ast
import importlib
import math
import re
import statistics
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

from regret_scenarios import draw, run
from scenes import arguments, print_machine

import tenuto

ROOT = Path(tenuto.__file__).resolve().parent
FOLDERS = ("batching", "deployments", "placement", "profiles", "mps", "loadgen", "cli")
_LINE = re.compile(r"#\s*fitted\b:?\s*(.*)")


class Constant(NamedTuple):
    """A constant of a module, and what its comment says."""

    module: str
    name: str
    value: float
    said: str


def more(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--count", type=int, default=30, help="scenarios")
    parser.add_argument("--seed", type=int, default=1, help="of the scenarios")
    parser.add_argument("--requests", type=int, default=10_000, help="per scenario, at least")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--only", nargs="*", default=[], help="names of constants, or MODULE:NAME of any other")
    parser.add_argument("--list", action="store_true", help="print the constants of the whole product and end")


def fitted(folders: tuple[str, ...] = FOLDERS) -> Iterator[Constant]:
    """Find every constant whose comment says that it is fitted, in the whole product."""
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            lines = path.read_text().splitlines()
            for node in ast.parse("\n".join(lines)).body:
                if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
                    said = _LINE.search(lines[node.end_lineno - 1 if node.end_lineno else 0])
                    target = node.targets[0] if isinstance(node, ast.Assign) else node.target
                    if said and isinstance(target, ast.Name):
                        module = "tenuto." + ".".join(path.relative_to(ROOT).with_suffix("").parts)
                        value = eval(compile(ast.Expression(node.value), "", "eval"), {"math": math})
                        yield Constant(module, target.id, value, said[1])


def attained(task: tuple[int, int, int, str, str, float | None]) -> float:
    """Return the share in time of one scenario with one constant at another value."""
    seed, number, requests, module, name, value = task
    before = None
    if value is not None:
        held = importlib.import_module(module)
        before = getattr(held, name)
        setattr(held, name, value)
    try:
        return run(draw(seed, number, requests), "deferred")[0].attainment
    finally:
        if value is not None:
            setattr(held, name, before)


def main() -> None:
    chosen = arguments(__doc__ or "", more)
    found = list(fitted())
    if chosen.list:
        for constant in found:
            print(f"{constant.module}:{constant.name} = {constant.value:g}  {constant.said}")
        print(f"{len(found)} fitted constants")
        return
    print_machine()
    found = [c for c in found if c.module.startswith("tenuto.batching.") and ".planning." not in c.module]
    if chosen.only:
        known = {c.name: c for c in found}
        found = []
        for name in chosen.only:
            if ":" in name:
                module, _, attribute = name.partition(":")
                value = getattr(importlib.import_module(module), attribute)
                found.append(Constant(module, attribute, value, ""))
            else:
                found.append(known[name])
    count = 6 if chosen.quick else chosen.count
    numbers = range(count)
    with ProcessPoolExecutor(chosen.processes) as pool:

        def tried(module: str, name: str, value: float | None) -> list[float]:
            return list(pool.map(attained, [(chosen.seed, n, chosen.requests, module, name, value) for n in numbers]))

        as_it_is = tried("", "", None)
        print(f"{count} scenarios of seed {chosen.seed}: {100 * statistics.mean(as_it_is):.2f} % in time", flush=True)
        print(f"{'':40s}{'value':>10s}{'halved':>18s}{'doubled':>18s}")
        for constant in found:
            columns = ""
            for factor in (0.5, 2.0):
                value = type(constant.value)(constant.value * factor) if constant.value else 1.0
                apart = [
                    100 * (b - a) for a, b in zip(as_it_is, tried(constant.module, constant.name, value), strict=True)
                ]
                error = statistics.stdev(apart) / math.sqrt(count) if count > 1 else math.nan
                columns += f"{statistics.mean(apart):+9.2f} ± {error:.2f} "
            print(f"{constant.name:40s}{constant.value:10g}{columns}", flush=True)


if __name__ == "__main__":
    main()
