"""Measures a GPU for Tenuto: what runs and how fast, what CUDA MPS really does, a profile, occupancy.

Each step is one command with a time limit of its own. Its results are on disk when it ends, and a page with all results
so far is written after each step. A second run on the same folder runs only the steps that did not end. Exit code 1: a
step failed; 3: there is no usable GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tenuto
from tenuto.errors import InvalidInputError, TenutoError
from tenuto.mps.inventory import without_mps
from tenuto_lab.gpu_check.page import report_page
from tenuto_lab.gpu_check.results import Results
from tenuto_lab.gpu_check.steps import CALLS, Sizes, Step, steps

Run = Callable[[Step, Mapping[str, str], float], int]
"""Runs a step in an environment within a limit in s; returns its exit code, 124 if it was stopped."""

STOPPED = 124
_GRACE_S = 25.0
_NO_GPU = 3
_PACKAGES = (Path(tenuto.__file__).parents[1], Path(__file__).parents[2])  # where steps import both packages from


def main(
    arguments: Sequence[str] | None = None,
    *,
    run: Run | None = None,
    sizes: Sizes | None = None,
    clock_s: Callable[[], float] = time.monotonic,
) -> int:
    """Run the steps asked for; returns the exit code.

    Args:
        arguments: of the command line.
        run: runs a step, also in a dry run; default a process of this Python, and none in a dry run.
        sizes: how much is measured; default: as in the arguments.
        clock_s: monotonic clock.
    """
    given = _parser().parse_args(arguments)
    folder = Path(given.output).resolve()
    sizes = sizes or Sizes(options=tuple(given.option), **({} if not given.models else {"models": given.models}))
    try:
        chosen = _chosen(_steps(folder, sizes, given.gpu), given.steps)
    except TenutoError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    if given.list or given.dry_run:
        for step in chosen:
            print(
                step.name
                if given.list
                else f"# {step.call} {step.name}, within {step.limit_s:g} s\n{step.shown(Path(sys.executable).name)}"
            )
        if given.list or run is None:
            return 0
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        print(f"error: {folder} cannot be written: {error.strerror}. Give another folder with -o.", file=sys.stderr)
        return _NO_GPU
    return _Steps(Results(folder), run or run_step, clock_s, given.limit_s).all(
        [step.name for step in chosen], lambda: _steps(folder, sizes, given.gpu)
    )


def _parser() -> argparse.ArgumentParser:
    groups = "; ".join(f"{call}: {what}" for call, what in CALLS.items())
    parser = argparse.ArgumentParser(prog="scripts/gpu_check", description=__doc__, epilog=f"Groups of steps: {groups}")
    parser.add_argument("-o", "--output", default="gpu-check", help="folder of the results (default: %(default)s)")
    parser.add_argument(
        "--steps",
        default="A,B,C,D,F",
        metavar="NAME,…",
        help="groups, names or beginnings of names (default: %(default)s); --list shows them",
    )
    parser.add_argument("--list", action="store_true", help="list the steps and leave")
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print every command; the script then walks all on a virtual GPU, and measures nothing",
    )
    parser.add_argument("--limit-s", type=float, metavar="S", help="for the whole: no step goes on for longer")
    parser.add_argument(
        "--models",
        type=lambda text: tuple(text.split(",")),
        metavar="MODEL,…",
        help=f"the first is measured in every step (default: {','.join(Sizes().models)})",
    )
    parser.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="K=V",
        help="option of every model, such as dtype=fp16; repeatable",
    )
    parser.add_argument("--gpu", help="UUID of the GPU; default the first")
    return parser


def _steps(folder: Path, sizes: Sizes, gpu: str | None) -> tuple[Step, ...]:
    """Return the steps for the GPU, as far as it is known by now."""
    found = Results.look(folder, "inventory.json")
    return steps(folder, str(found.get("type", "gpu")), sizes, gpu)


def _chosen(known: Sequence[Step], text: str) -> list[Step]:
    wanted = [part.strip() for part in text.split(",") if part.strip()]
    for part in wanted:
        if part not in CALLS and not any(step.name.startswith(part) for step in known):
            raise InvalidInputError(f"no step begins with {part!r}. Use --list with --steps {','.join(CALLS)}.")
    return [
        step
        for step in known
        if any(part == step.call if part in CALLS else step.name.startswith(part) for part in wanted)
    ]


class _Steps:
    """One run over a folder."""

    def __init__(self, results: Results, run: Run, clock_s: Callable[[], float], limit_s: float | None) -> None:
        self._results, self._run, self._clock_s = results, run, clock_s
        self._until_s = None if limit_s is None else clock_s() + limit_s
        self._done: dict[str, Any] = results.read("steps.json")

    def all(self, names: Sequence[str], known: Callable[[], Sequence[Step]]) -> int:
        """Run the steps of these names, the inventory before all, and write the page after each.

        Steps are looked up anew each time: their commands name what the inventory found.
        """
        first = ["inventory"]
        if any(step.needs != "nothing" for step in known() if step.name in names):
            first.append("first-client")  # it decides whether the others run
        for name in (*first, *(name for name in names if name not in first)):
            step = next(step for step in known() if step.name == name)
            code = self._one(step)
            self._results.write_text("report.md", report_page(self._results))
            if name == "inventory" and code != 0:
                print("no GPU to check", file=sys.stderr)
                return _NO_GPU
        failed = [name for name in names if "failed" in self._done.get(name, {})]
        if failed:
            print(f"steps that failed: {', '.join(failed)}; see {self._results.path('report.md')}", file=sys.stderr)
        print(f"results in {self._results.folder}")
        return 1 if failed else 0

    def _one(self, step: Step) -> int:
        if self._done.get(step.name, {}).get("exit_code") == 0:
            return 0
        reason = self._obstacle(step)
        if reason is not None:
            self._note(step, {"left_out": reason})
            return 0
        limit_s = step.limit_s if self._until_s is None else min(step.limit_s, self._until_s - self._clock_s())
        if limit_s <= _GRACE_S:
            self._note(step, {"failed": "the time for the whole check was over"})
            return STOPPED
        print(f"step {step.name}: {step.shown(Path(sys.executable).name)}", file=sys.stderr, flush=True)
        began_s = self._clock_s()
        code = self._run(step, self._environment(step), limit_s)
        result: dict[str, Any] = {"exit_code": code, "took_s": round(self._clock_s() - began_s, 1)}
        if code != 0:
            said = f"stopped after {limit_s:.0f} s" if code == STOPPED else f"exit code {code}"
            result["failed"] = f"{said}; what was measured by then is kept"
        self._note(step, result)
        return code

    def _obstacle(self, step: Step) -> str | None:
        """Return why a step is not for this machine; None if it is."""
        missing = [name for name in step.packages if importlib.util.find_spec(name) is None]
        if missing:
            return f"it needs the package {', '.join(missing)}; put its wheel beside the others (TENUTO_WHEELS)"
        if step.name == "occupancy-import" and self._done.get("occupancy", {}).get("exit_code") != 0:
            return "Nsight Compute recorded nothing"
        if step.name == "occupancy-import" and not Path(step.arguments[-1]).exists():
            return "there is no profile to read it into; group C makes one"
        found = self._results.read("mps.json")
        if step.needs == "mps" and not found.get("is_usable"):
            return f"CUDA MPS cannot be used here: {found.get('reason') or 'step first-client was not run'}"
        if step.needs == "no mps" and found.get("is_usable"):
            return "CUDA MPS can be used here, and tells more"
        return None

    def _environment(self, step: Step) -> dict[str, str]:
        """Return the environment of a step: this GPU alone, and no share or daemon of anybody's."""
        uuid = self._results.read("inventory.json").get("uuid")
        chosen = {} if uuid is None else {"CUDA_VISIBLE_DEVICES": str(uuid)}
        path = os.pathsep.join(filter(None, (*map(str, _PACKAGES), os.environ.get("PYTHONPATH"))))
        return {
            **without_mps(os.environ),
            **_rooms(self._results.folder),
            "PYTHONPATH": path,
            "PYTHONUNBUFFERED": "1",
            **chosen,
            **step.environment,
        }

    def _note(self, step: Step, result: dict[str, Any]) -> None:
        self._done[step.name] = {"call": step.call, "command": step.shown("python"), **result}
        self._results.write("steps.json", self._done)
        said = result.get("left_out") or result.get("failed") or f"done in {result['took_s']} s"
        self._results.log(f"{step.name}: {said}")


def _rooms(folder: Path) -> dict[str, str]:
    """Return where steps put temporary files and sockets on a machine whose /tmp cannot be written."""
    if os.access("/tmp", os.W_OK):
        return {}
    room = folder / "tmp"
    room.mkdir(exist_ok=True, mode=0o700)
    return {"TMPDIR": str(room), "TENUTO_MPS_ROOT": os.environ.get("TENUTO_MPS_ROOT", str(room))}


def run_step(step: Step, environment: Mapping[str, str], limit_s: float, grace_s: float = _GRACE_S) -> int:
    """Run one step. `grace_s` before its limit the step is asked to stop, because a client that is killed at work may
    take the CUDA MPS server with it. At the limit it is killed with everything that it started."""
    command = [sys.executable, "-P", *step.arguments]
    with subprocess.Popen(command, env=dict(environment), start_new_session=True) as process:
        try:
            return process.wait(limit_s - grace_s)
        except (subprocess.TimeoutExpired, KeyboardInterrupt) as stop:
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(grace_s)
            if isinstance(stop, KeyboardInterrupt):
                raise
            return STOPPED
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
