"""How far each scheduler is behind the best of all others, over random scenarios that no scheduler was written for.

What is drawn is said in `regret_scenarios.py`. Design scenarios have a fixed seed and are for finding rules. Judging
scenarios take their seed from the hash of the commit in which the rule was frozen, so that nobody can have looked.

    python lab/benchmarks/bench_regret.py [--quick] [--count 60] [--judge COMMIT] [--wide] [--sized] [--keep FILE]
        [--worst 10]

Regret: the best attainment of all others minus one's own. Attainment: requests (or calls of an application) answered in
time over those offered after the warm-up, a fifth of the run. With `--keep` results are kept, and not computed again.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from regret_scenarios import REQUESTS, Scenario, draw, run
from scenes import arguments, print_machine

DESIGN_SEED = 1
CONTESTANTS: dict[str, tuple[str, dict[str, object]]] = {
    "deferred": ("deferred", {}),
    "not rehearsed": ("deferred", {"rehearse": False}),
    "published": ("symphony", {}),
    "target": ("symphony", {"release": "target"}),
    "eager": ("eager", {}),
    "timeout": ("timeout", {}),
    "clockwork": ("clockwork", {}),
    "nexus": ("nexus", {}),
    "shepherd": ("shepherd", {}),
}
OURS = ("deferred", "not rehearsed")
RIVALS = tuple(name for name in CONTESTANTS if name not in OURS)
POINT = 0.01


@dataclass(frozen=True)
class Row:
    """One contestant in one scenario."""

    scenario: str
    contestant: str
    attainment: float
    worst: float
    microseconds: float  # of CPU per request, the simulator's included
    families: list[str]


def more(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--count", type=int, default=60, help="scenarios")
    parser.add_argument("--first", type=int, default=0, help="number of the first of them")
    parser.add_argument("--requests", type=int, default=None, help=f"per scenario, at least (default {REQUESTS})")
    parser.add_argument("--judge", metavar="COMMIT", help="judging scenarios, by the commit that froze the rule")
    parser.add_argument("--wide", action="store_true", help="models whose SLOs lie 10 to 100 times apart")
    parser.add_argument("--sized", action="store_true", help="about half of the models vary in size")
    parser.add_argument("--keep", type=Path, help="a file that keeps results, one JSON object per line")
    parser.add_argument("--worst", type=int, default=5, help="so many of the scenarios with the largest regret")


def main() -> None:
    chosen = arguments(__doc__ or "", more)
    print_machine()
    seed = int(chosen.judge[:12], 16) if chosen.judge else DESIGN_SEED
    count = 12 if chosen.quick else chosen.count
    requests = chosen.requests or (8_000 if chosen.quick else REQUESTS)
    kept = {(row.scenario, row.contestant): row for row in _read(chosen.keep)}
    rows: list[Row] = []
    for number in range(chosen.first, chosen.first + count):
        scenario = draw(seed, number, requests, wide=chosen.wide, sized=chosen.sized)
        for contestant in CONTESTANTS:
            row = kept.get((scenario.name, contestant))
            if row is None:
                row = measured(scenario, contestant)
                if chosen.keep:
                    with chosen.keep.open("a") as file:
                        file.write(json.dumps(asdict(row)) + "\n")
            rows.append(row)
    kind = f"judging, frozen in {chosen.judge[:12]}" if chosen.judge else "design"
    print(f"{count} scenarios ({kind}), {requests:,} requests each\n")
    show(rows, chosen.worst)


def _read(path: Path | None) -> Iterable[Row]:
    if path is not None and path.exists():
        for line in path.read_text().splitlines():
            yield Row(**json.loads(line))


def measured(scenario: Scenario, contestant: str) -> Row:
    """Run one contestant over one scenario."""
    scheduler, options = CONTESTANTS[contestant]
    began = time.process_time()
    ran, result = run(scenario, scheduler, options)
    spent_s = time.process_time() - began
    requests = max(1, int(result.counts().sum()))
    return Row(scenario.name, contestant, ran.attainment, ran.worst, 1e6 * spent_s / requests, scenario.families())


def show(rows: list[Row], worst: int) -> None:
    """Print the contestants, the families of scenarios, and the scenarios in which `deferred` does worst."""
    by_scenario: dict[str, dict[str, Row]] = defaultdict(dict)
    for row in rows:
        by_scenario[row.scenario][row.contestant] = row
    regret = {
        name: {scenario: _best_other(found, name) - found[name].attainment for scenario, found in by_scenario.items()}
        for name in CONTESTANTS
    }
    above = ("mean", "mean", "largest", "> 1 point", "> 5 points", "mean of the", "us per")
    below = ("in time", "regret", "regret", "behind", "behind", "worst model", "request")
    for words in (above, below):
        print(f"{'':14s}" + "".join(f"{word:>13s}" for word in words))
    for name in CONTESTANTS:
        mine = list(regret[name].values())
        attained = [found[name] for found in by_scenario.values()]
        print(
            f"{name:14s}{100 * statistics.mean(row.attainment for row in attained):12.1f}%"
            f"{100 * statistics.mean(mine):13.2f}{100 * max(mine):13.1f}"
            f"{100 * sum(r > POINT for r in mine) / len(mine):12.0f}%"
            f"{100 * sum(r > 5 * POINT for r in mine) / len(mine):12.0f}%"
            f"{100 * statistics.mean(row.worst for row in attained):12.1f}%"
            f"{statistics.median(row.microseconds for row in attained):13.1f}"
        )
    apart = [_spread(found) for found in by_scenario.values()]
    wide = 100 * sum(a > 2 * POINT for a in apart) / len(apart)
    print(f"\nbest and worst of the others differ by more than 2 points in {wide:.0f} % of the scenarios")
    best = Counter(max(RIVALS, key=lambda name: found[name].attainment) for found in by_scenario.values())
    print("best of the others: " + ", ".join(f"{name} {count}" for name, count in best.most_common()))
    columns = "".join(f"{word:>12s}" for word in ("scenarios", "deferred", "published", "best other", "regret up to"))
    ahead = [100 * (found["deferred"].attainment - found["published"].attainment) for found in by_scenario.values()]
    error = statistics.stdev(ahead) / math.sqrt(len(ahead)) if len(ahead) > 1 else math.nan
    print(f"deferred is {statistics.mean(ahead):.2f} points ahead of published, standard error {error:.2f}")
    print(f"\n{'by family':24s}{columns}")
    families: dict[str, list[str]] = defaultdict(list)
    for scenario, found in by_scenario.items():
        for family in found["deferred"].families:
            families[family].append(scenario)
    for family in sorted(families):
        members = families[family]
        ours, published, others = (
            100 * statistics.mean(value(by_scenario[scenario]) for scenario in members)
            for value in (
                lambda found: found["deferred"].attainment,
                lambda found: found["published"].attainment,
                lambda found: _best_other(found, "deferred"),
            )
        )
        highest = 100 * max(regret["deferred"][scenario] for scenario in members)
        print(f"{family:24s}{len(members):12d}{ours:11.1f}%{published:11.1f}%{others:11.1f}%{highest:12.1f}")
    print("\nlargest regret of deferred")
    for scenario, lost in sorted(regret["deferred"].items(), key=lambda item: -item[1])[:worst]:
        found = by_scenario[scenario]
        rival = max(RIVALS, key=lambda name: found[name].attainment)
        print(
            f"{scenario:16s}{100 * lost:6.1f} points behind {rival} ({100 * found[rival].attainment:.1f} %): "
            + ", ".join(found["deferred"].families)
        )


def _best_other(found: dict[str, Row], name: str) -> float:
    return max(found[rival].attainment for rival in RIVALS if rival != name)


def _spread(found: dict[str, Row]) -> float:
    attained = [found[name].attainment for name in RIVALS]
    return max(attained) - min(attained)


if __name__ == "__main__":
    main()
