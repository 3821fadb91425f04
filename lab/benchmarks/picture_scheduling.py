"""Draw the pictures of docs/reference/scheduling.md from real runs: a plan as made, a rehearsal as replayed.

python lab/benchmarks/picture_scheduling.py docs/pictures
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from html import escape
from pathlib import Path
from unittest.mock import patch

from scenes import poisson

from tenuto.batching.core.deferred import DeferredOptions, DeferredScheduler, deferring
from tenuto.batching.core.deferred.lineup import line_up
from tenuto.batching.core.deferred.waiting import WaitingQueue
from tenuto.batching.core.scheduler import Decision, Dispatch, Drop
from tenuto.batching.core.system import Host, Model, ScheduledGpulet, System
from tenuto.batching.rehearsal.observer import Rehearsals
from tenuto.batching.rehearsal.replay import Replay, Replayed
from tenuto.batching.virtual import engine
from tenuto.batching.virtual.simulator import simulate

COLOURS = ("#2f6fb0", "#c8722c", "#3f8f4f", "#8a5fb5", "#a0853a")
WIDTH, LEFT, RIGHT, ROW = 860, 92, 16, 34


@dataclass(frozen=True)
class Planned:
    """A batch in a plan: times in ms from the plan on; gpu-let -1: pushed out."""

    name: str
    size: int
    gpulet: int
    start: float
    end: float
    due: float
    latest: float


class Plans:
    """Makes plans as `line_up` does, and keeps the first of at least four batches that can still wait, while both
    gpu-lets run."""

    def __init__(self, system: System) -> None:
        self.scheduler = DeferredScheduler(system, DeferredOptions(hold=1.0, rehearse=False))
        self.kept: tuple[list[float], list[Planned]] | None = None

    def line_up(self, waiting: list[WaitingQueue], now: float) -> tuple[bool, float]:
        ends = [0.0] * len(self.scheduler.system.gpulets)
        for pool in {pool.index: pool for queue in waiting for pool in queue.pools}.values():
            for end, gpulet in pool.busy:
                ends[gpulet] = end - now
        is_tight, passing_ms = line_up(waiting, now)
        free, found = list(ends), []
        for queue in waiting:
            batch = queue.batch
            start = batch.end - batch.run_ms - now
            gpulet = next((g for g, at in enumerate(free) if abs(max(at, 0.0) - start) < 1e-6), -1)
            found.append(
                Planned(
                    self.scheduler.system.programs[queue.program].name,
                    batch.size,
                    gpulet,
                    start,
                    start + batch.run_ms,
                    batch.due - now,
                    batch.latest - now,
                )
            )
            if gpulet >= 0:
                free[gpulet] = start + batch.run_ms
        used = {batch.gpulet for batch in found}
        is_telling = (
            len(found) >= 4 and used == set(range(len(ends))) and max(ends) > 8.0 and not is_tight and passing_ms > 2.0
        )
        if self.kept is None and is_telling:
            self.kept = ends, found
        return is_tight, passing_ms


def plan() -> str:
    """Return a picture of a plan: five models on two gpu-lets."""
    lines = ((1.0, 6.0, 60.0), (2.0, 9.0, 80.0), (1.0, 5.0, 50.0), (3.0, 8.0, 90.0), (1.5, 7.0, 70.0))
    hosts = {
        number: Host((0.0, *(alpha * size + beta for size in range(1, int((slo - beta) / alpha) + 1))))
        for number, (alpha, beta, slo) in enumerate(lines)
    }
    models = tuple(Model("ABCDE"[number], slo, 90.0) for number, (_, _, slo) in enumerate(lines))
    system = System(models, tuple(ScheduledGpulet(f"g{number}", f"g{number}", hosts) for number in range(2)))
    plans = Plans(system)
    with patch.object(deferring, "line_up", plans.line_up):
        simulate(plans.scheduler, *poisson([90.0] * 5, 60.0, 1), duration_s=60.0)
    assert plans.kept is not None, "no plan of the run shows enough"
    ends, batches = plans.kept
    inner = WIDTH - LEFT - RIGHT
    last = max(max(batch.latest, batch.end) for batch in batches) * 1.02
    slack = min(batch.due - batch.start for batch in batches)

    def x(at: float) -> float:
        return LEFT + inner * at / last

    parts = []
    top = 62
    for gpulet, end in enumerate(ends):
        y = top + gpulet * (ROW + 8)
        parts.append(_text(LEFT - 8, y + 21, f"gpu-let {gpulet}", "end"))
        if end > 0.0:
            parts.append(_box(x(0), y, x(end), "#ddd", "running", "#555"))
    below = top + len(ends) * (ROW + 8) + 22
    for row, batch in enumerate(batches):
        colour = COLOURS["ABCDE".index(batch.name)]
        y = top + batch.gpulet * (ROW + 8)
        parts.append(_box(x(batch.start), y, x(batch.end), colour, f"{batch.name}: {batch.size}", "white"))
        y = below + row * 24
        parts.append(_text(LEFT - 8, y + 4, f"{batch.name}, {batch.size} waiting", "end", colour))
        parts.append(_line(x(batch.start), y, x(batch.due), y, colour, 5))
        parts.append(_line(x(batch.due), y, x(batch.latest), y, colour, 1.5, "4 3"))
        parts.append(
            f'<circle cx="{x(batch.due):.1f}" cy="{y}" r="4.5" fill="white" stroke="{colour}" stroke-width="2"/>'
        )
        parts.append(_line(x(batch.latest), y - 7, x(batch.latest), y + 7, colour, 2.5))
    bottom = below + len(batches) * 24
    parts += _axis(x, bottom, last, "ms from now")
    title = f"A plan: five models, two gpu-lets; every batch may still be held for {slack:.0f} ms"
    legend = "thick: from its planned start, the time it can be held   ○ due   | latest start"
    return _picture(title, legend, parts, bottom + 44)


class Keeping(Rehearsals):
    """Keeps the first replay that it gives out, and the hold that it adopts."""

    replay: Replay | None = None
    adopted: float | None = None

    def arrived(self, now: float, model: int, deadline_ms: float) -> Replay | None:
        replay = super().arrived(now, model, deadline_ms)
        if self.replay is None:
            self.replay = replay
        return replay

    def learn(self, result: list[Replayed], now: float, cpu_ms: float | None = None) -> None:
        super().learn(result, now, cpu_ms)
        if self.adopted is None:
            self.adopted = self.status().hold


class Noted(list[Decision]):
    """Decisions that are kept when they are cleared."""

    def __init__(self) -> None:
        super().__init__()
        self.all: list[Decision] = []

    def append(self, decision: Decision) -> None:
        self.all.append(decision)
        super().append(decision)


class Playing(DeferredScheduler):
    """Keeps what replays decide."""

    played: list[list[Decision]] = []  # noqa: RUF012, one list for the picture

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self.decisions = noted = Noted()
        self.played.append(noted.all)


def rehearsal() -> str:
    """Return a picture of the first rehearsal of two models that take turns on one gpu-let."""
    hosts = dict.fromkeys((0, 1), Host((0.0, *(0.1 * size + 18.0 for size in range(1, 9)))))
    system = System((Model("A", 40.0, 15.0), Model("B", 40.0, 15.0)), (ScheduledGpulet("g0", "g0", hosts),))
    scheduler = DeferredScheduler(system, DeferredOptions(hold=1.0))
    kept = Keeping(scheduler)
    with patch.object(engine, "rehearsals_of", lambda _scheduler: kept):
        simulate(scheduler, *poisson([15.0, 15.0], 20.0, 6))
    assert kept.replay is not None
    assert kept.adopted is not None
    Playing.played.clear()
    return _rehearsal(kept.replay, kept.replay._replace(scheduler=Playing).run(), kept.adopted)


def _rehearsal(job: Replay, found: list[Replayed], adopted: float) -> str:
    lost = [1.0 - sum(one.met) / sum(one.offered) for one in found]
    at = {number: (when, model) for number, (when, model, _) in enumerate(job.arrivals)}
    gone = [[n for d in one if isinstance(d, Drop) for n in d.request_ids if n >= 0] for one in Playing.played]
    # The 900 ms in which the most are lost with the present setting, the last value.
    moments = [at[number][0] for number in gone[-1]]
    span = 900.0
    begin = max(moments, key=lambda m: sum(m <= other < m + span for other in moments)) - 60.0
    inner = WIDTH - LEFT - RIGHT - 190

    def x(when: float) -> float:
        return LEFT + inner * (when - begin) / span

    parts = [_text(LEFT - 8, 74, "recorded", "end")]
    for when, model in at.values():
        if begin <= when < begin + span:
            parts.append(_line(x(when), 58, x(when), 80, COLOURS[model], 2))
    longest = max(lost)
    top = 98
    for row, (one, decisions) in enumerate(zip(found, Playing.played, strict=True)):
        y = top + row * (ROW + 14)
        parts.append(_text(LEFT - 8, y + 21, f"hold {one.setting.hold:g}", "end"))
        for decision in decisions:
            if isinstance(decision, Dispatch) and begin <= decision.start_ms and decision.finish_ms < begin + span:
                label = str(len(decision.request_ids))
                parts.append(
                    _box(x(decision.start_ms), y, x(decision.finish_ms), COLOURS[decision.program], label, "white")
                )
        for number in gone[row]:
            if begin <= at[number][0] < begin + span:
                parts.append(_text(x(at[number][0]), y + ROW + 11, "✕", "middle", "#c00"))
        left = WIDTH - RIGHT - 170
        parts.append(f'<rect x="{left}" y="{y + 8}" width="{60 * lost[row] / longest:.1f}" height="16" fill="#999"/>')
        hold = one.setting.hold
        note = ", adopted" if hold == adopted else ", until then" if row == len(found) - 1 else ""
        parts.append(_text(left + 66, y + 21, f"{lost[row]:.1%}{note}", "start"))
    bottom = top + len(found) * (ROW + 14)
    parts += _axis(lambda when: x(begin + when), bottom, span, "ms of the recording")
    parts.append(_text(WIDTH - RIGHT - 170, 74, "lost of all that were recorded", "start"))
    count = job.counted[1] - job.counted[0]
    title = f"A rehearsal: {count} arrivals of two models on one gpu-let, replayed with four values of hold"
    return _picture(
        title, "boxes: batches with their sizes   ✕ requests given up, where they arrived", parts, bottom + 44
    )


# Drawing -------------------------------------------------------------------------------------------------------------


def _picture(title: str, legend: str, parts: list[str], height: float) -> str:
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" width="{WIDTH}" height="{height:g}" '
        'font-family="sans-serif" font-size="12" fill="#222">',
        f'<rect width="{WIDTH}" height="{height:g}" fill="white"/>',
        f'<text x="{LEFT}" y="20" font-size="14" font-weight="bold">{escape(title)}</text>',
        f'<text x="{LEFT}" y="40" fill="#555">{escape(legend)}</text>',
    ]
    return "\n".join([*head, *parts, "</svg>", ""])


def _text(x: float, y: float, words: str, anchor: str, colour: str = "#222") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}">{escape(words)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, colour: str, width: float, dashes: str = "") -> str:
    look = f'stroke="{colour}" stroke-width="{width}"' + (f' stroke-dasharray="{dashes}"' if dashes else "")
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" {look}/>'


def _box(left: float, y: float, right: float, colour: str, words: str, ink: str) -> str:
    size = f'width="{max(1.0, right - left - 1):.1f}" height="{ROW - 4}"'
    return f'<rect x="{left + 0.5:.1f}" y="{y}" {size} fill="{colour}"/>' + _text(
        (left + right) / 2, y + 20, words, "middle", ink
    )


def _axis(x: object, y: float, last: float, label: str) -> list[str]:
    assert callable(x)
    step = next(step for step in (1, 2, 5, 10, 20, 50, 100, 200) if last / step <= 12)
    parts = [_line(x(0), y, x(last), y, "#555", 1)]
    for number in range(int(last / step) + 1):
        parts.append(_line(x(number * step), y, x(number * step), y + 4, "#555", 1))
        parts.append(_text(x(number * step), y + 17, f"{number * step:g}", "middle"))
    parts.append(_text((x(0) + x(last)) / 2, y + 34, label, "middle"))
    return parts


def main() -> None:
    """Write both pictures to a folder."""
    folder = Path(sys.argv[1])
    (folder / "scheduling-plan.svg").write_text(plan(), encoding="utf-8")
    (folder / "scheduling-rehearsal.svg").write_text(rehearsal(), encoding="utf-8")


if __name__ == "__main__":
    main()
