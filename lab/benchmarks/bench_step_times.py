"""Step times of language models, fitted to measured cells: the errors on cells left out of the fit.

python lab/benchmarks/bench_step_times.py CELLS.json [--distserve FORMS.json --write profiles/data]

CELLS.json has `rows` of model, tensor_parallel, share_pct, batch, tokens_each, prefill_ms, decode_step_ms, as published
with MuxServe (ICML 2024); FORMS.json has the closed forms of DistServe (OSDI 2024). --write makes the shipped profiles.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

import numpy as np

from tenuto_lab.generation.shipped import distserve_a100, muxserve_a100
from tenuto_lab.generation.step_times import Cell, Errors, by_model, errors, fit, left_out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cells", type=Path)
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--distserve", type=Path)
    parser.add_argument("--write", type=Path)
    chosen = parser.parse_args()
    cells = [Cell(*row) for row in json.loads(chosen.cells.read_text(encoding="utf-8"))["rows"]]
    print(f"{len(cells)} cells of {len(by_model(cells))} pairs of model and number of GPUs\n")
    print(f"{'left out':22s}" + "".join(f"{kind + ' mean':>14s} {'p95':>7s}" for kind in ("prefill", "decode", "both")))
    print_errors("nothing", joined([errors(fit(group), group) for group in by_model(cells).values()]))
    drawn = []
    for seed in range(chosen.seeds):
        draws = random.Random(seed)
        out = {cell for cell in cells if draws.random() < 0.15}
        drawn.append(left_out(cells, out.__contains__))
    print_errors(f"15 %, {chosen.seeds} draws", joined(drawn))
    for what in ("share_pct", "batch"):
        found = []
        for value in sorted({getattr(cell, what) for cell in cells}):
            found.append(left_out(cells, {cell for cell in cells if getattr(cell, what) == value}.__contains__))
            print_errors(f"{what} {value:g}", found[-1])
        print_errors(f"each {what}", joined(found))
    profiles = [muxserve_a100(cells)]
    if chosen.distserve is not None:
        profiles.append(distserve_a100(json.loads(chosen.distserve.read_text(encoding="utf-8"))))
    for profile in profiles if chosen.write is not None else ():
        (chosen.write / f"{profile.name}.yaml").write_text(profile.dump(), encoding="utf-8")


def joined(parts: list[Errors]) -> Errors:
    return Errors(tuple(e for p in parts for e in p.prefill), tuple(e for p in parts for e in p.decode))


def print_errors(name: str, found: Errors) -> None:
    columns = "".join(
        f"{100 * float(np.mean(kind)):12.2f} % {100 * float(np.quantile(kind, 0.95)):5.1f} %" if kind else f"{'-':>22s}"
        for kind in (found.prefill, found.decode, found.both)
    )
    print(f"{name:22s}{columns}", flush=True)


if __name__ == "__main__":
    main()
