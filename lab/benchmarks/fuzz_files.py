"""Read a million mutated files with every reader of ours, and count what becomes of them.

    python lab/benchmarks/fuzz_files.py [--files 1000000] [--seed 0] [--workers 2] [--until HH:MM] [-o FILE.json]

Files are mutated as in tests/instruments/mutated_files.py: bytes, lines, structure, numbers. Workers read them under a
limit of address space, and one that has looked at a file for too long is ended. Each file must be accepted, or refused
with the error of wrong input; anything else is a fault, which is shown with the number of its file. File n of a seed is
always the same, whatever the workers. The exit code is 1 when anything is wrong. `--until` ends it early, with what it
has by then.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import resource
import signal
import sys
import tempfile
import time
from collections import Counter
from datetime import datetime
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

_LIMIT_S = 2.0  # processor time for one file
_HUNG_S = 10.0  # processor time after which the kernel ends the process
_MOST_BYTES = 500 << 20  # address space beside what the imports took
_PART = 200  # files between two reports


def _work(worker: int, workers: int, files: int, seed: int, first: int, line: Connection) -> None:
    from tests.instruments.mutated_files import READERS, is_accepted, mutated

    folder = Path(tempfile.mkdtemp(prefix="tenuto-fuzz-"))
    names = list(READERS)
    for reader in READERS.values():
        is_accepted(reader, reader.valid, folder)  # imports what it needs
    took = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (took + _MOST_BYTES, took + _MOST_BYTES))
    counts: Counter[str] = Counter()
    slowest: tuple[float, int] = (0.0, -1)
    faults: list[str] = []
    number = first
    while number < files:
        name = names[number % len(names)]
        content = mutated(READERS[name].valid, random.Random(f"{seed} {number}"))
        line.send(number)
        signal.setitimer(signal.ITIMER_PROF, _HUNG_S)
        begin = time.process_time()
        try:
            counts["accepted" if is_accepted(READERS[name], content, folder) else "refused"] += 1
        except BaseException as error:
            counts["faults"] += 1
            faults.append(f"file {number}, {name}: {type(error).__name__}: {str(error)[:200]}")
        took_s = time.process_time() - begin
        slowest = max(slowest, (took_s, number))
        if took_s > _LIMIT_S:
            faults.append(f"file {number}, {name}: took {took_s:.1f} s")
        number += workers
        if sum(counts.values()) >= _PART or number >= files:
            peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
            line.send((dict(counts), slowest, faults, peak_mib))
            counts, faults = Counter(), []
    line.send(None)


class _Worker:
    """One process, and the file that it looks at."""

    def __init__(self, index: int, args: argparse.Namespace, first: int) -> None:
        self._index, self._args = index, args
        self.number = first
        self.line, theirs = multiprocessing.Pipe(duplex=False)
        given = (index, args.workers, args.files, args.seed, first, theirs)
        self.process = multiprocessing.get_context("spawn").Process(target=_work, args=given, daemon=True)
        self.process.start()
        theirs.close()

    def next(self) -> _Worker:
        """Return a worker that goes on behind the file of this one, which has ended."""
        self.process.join()
        return _Worker(self._index, self._args, self.number + self._args.workers)


def main() -> int:
    """Run the workers to the end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--until", metavar="HH:MM")
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args()
    workers = [_Worker(index, args, index) for index in range(args.workers)]
    counts: Counter[str] = Counter()
    slowest, peak_mib, shown_at = (0.0, -1), 0, 0.0
    begin = time.monotonic()
    while workers and (args.until is None or datetime.now().strftime("%H:%M") < args.until):
        wait([worker.line for worker in workers], 1.0)
        for place, worker in reversed(list(enumerate(workers))):
            try:
                while worker.line.poll():
                    said: Any = worker.line.recv()
                    if isinstance(said, int):
                        worker.number = said
                    elif said is None:
                        workers.remove(worker)
                        break
                    else:
                        counts.update(said[0])
                        slowest, peak_mib = max(slowest, said[1]), max(peak_mib, said[3])
                        for fault in said[2]:
                            print(fault, flush=True)
            except EOFError:
                print(f"file {worker.number}: it ended the process, or hung", flush=True)
                counts["faults"] += 1
                workers[place] = worker.next()
        if time.monotonic() - shown_at > 60.0:
            shown_at = time.monotonic()
            print(f"{sum(counts.values())} files in {shown_at - begin:.0f} s: {dict(counts)}", flush=True)
    result = {
        "seed": args.seed,
        "files": sum(counts.values()),
        **counts,
        "slowest_s": round(slowest[0], 3),
        "slowest_file": slowest[1],
        "peak_mib": peak_mib,
        "took_s": round(time.monotonic() - begin),
    }
    print(json.dumps(result, indent=1))
    if args.output is not None:
        args.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 1 if counts["faults"] else 0


if __name__ == "__main__":
    sys.exit(main())
