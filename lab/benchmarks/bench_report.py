"""What a report costs: time, memory and page size for a million requests (issue 5 asks for under 60 s, 2 GiB and 5 MB).

Run: python lab/benchmarks/bench_report.py [--quick]
"""

from __future__ import annotations

import argparse
import resource
import sys
import tempfile
import time
from pathlib import Path

from tenuto.loadgen.report.run_page import write_report
from tenuto.loadgen.result_folder import hardware, versions
from tenuto.loadgen.run_files import write_run_files
from tenuto.loadgen.simulated import Simulation
from tenuto.placement import Gpulet, ModelSpec, Plan, PlannedGpu, PolicyUsed, Replica
from tenuto.profiles import LinearLatency


def _plan(models: int, rate_rps: float) -> Plan:
    line = LinearLatency(alpha_ms=1.0, beta_ms=5.0)
    names = [f"model{index}" for index in range(models)]
    return Plan(
        policy=PolicyUsed(name="one model per GPU"),
        gpus=tuple(PlannedGpu(id=f"n0/{index}", type="v100") for index in range(models)),
        gpulets=tuple(
            Gpulet(id=f"n0/{index}/a", gpu=f"n0/{index}", models=(Replica(name=name, batch_size=32, latency=line),))
            for index, name in enumerate(names)
        ),
        models=tuple(ModelSpec(name=name, rate_rps=rate_rps, slo_ms=60, latency=line) for name in names),
    )


def main() -> int:
    """Simulate, write the files, read them again and render; print what each step took."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="100,000 requests instead of 1,000,000")
    requests = 100_000 if parser.parse_args().quick else 1_000_000
    plan = _plan(10, 600.0)
    duration_s = requests / 6000.0
    print(f"{hardware()}\n{versions()}")
    run = Simulation.of_plan(plan, duration_s=duration_s).run()
    document, records = run.describe(plan, options={"seed": 0}, command=["bench_report"])
    with tempfile.TemporaryDirectory() as name:
        began = time.perf_counter()
        write_run_files(Path(name), document, records, run.schedule)
        written = time.perf_counter()
        page = write_report(name)
        rendered = time.perf_counter()
        sizes = {path.name: path.stat().st_size for path in Path(name).iterdir()}
        page_mb = page.stat().st_size / 1e6
    memory_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    requests = len(run.schedule)
    print(f"{requests:,} requests: files {written - began:.1f} s, page from files {rendered - written:.1f} s")
    print(f"page {page_mb:.2f} MB, most memory of the process, simulation included, {memory_mib:.0f} MiB")
    print({key: f"{size / 1e6:.2f} MB" for key, size in sorted(sizes.items())})
    return 0 if rendered - began < 60 and memory_mib < 2048 and page_mb < 5 else 1


if __name__ == "__main__":
    sys.exit(main())
