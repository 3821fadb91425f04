"""A plan as an SVG picture: one bar per GPU, its gpu-lets side by side by share, one colour per model. A joint program
has one label over all its models' colours. MIG instances are framed, as wide as their compute.

The picture needs no other file and is readable on light and dark pages. Its colours can be told apart with every common
colour-vision deficiency, and every part has a label or a tooltip.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from textwrap import wrap

from tenuto.pages import templates
from tenuto.placement.copy_times import hidden_copies_ms
from tenuto.placement.plan import Plan, PlannedGpu
from tenuto.placement.program import Gpulet, Program
from tenuto.placement.shown.table import totals_of, why_unserved

# Okabe and Ito's palette without black, then three of Tol's muted set; with more models colours repeat, labels do not.
PALETTE = ("#56B4E9", "#E69F00", "#009E73", "#F0E442", "#CC79A7", "#D55E00", "#0072B2", "#DDCC77", "#882255", "#44AA99")
LIGHT_TEXT_ON = {"#0072B2", "#882255"}  # the other colours carry dark text with a contrast above 5
MOST_SINGLE_BARS = 64  # format: above, GPUs with the same gpu-lets share one bar
JOINT = "#e7ebef"  # behind the label of a program of several members, whose models' colours are a strip below it
LETTERS = 169  # format: letters of a line below the bars, 1080 pixels at 11 pixels a letter and 0.58 of that its width


def draw(plan: Plan, colours: Mapping[str, str] | None = None) -> str:
    """Return the picture as SVG text.

    Args:
        plan: the plan.
        colours: CSS colours by model, for pages whose charts have some already. They are strips below the labels, as
            their contrast with text is unknown.
    """
    colours = _colours(plan) if colours is None else colours
    totals = totals_of(plan)
    cost = "" if totals.cost_per_hour is None else f" · {totals.cost_per_hour:,.2f} $/h"
    title = (
        f"{plan.policy.name}: {totals.goodput_rps:,.1f} of {totals.offered_rps:,.1f} rps expected · "
        f"{totals.gpus_used} of {totals.gpus} GPUs used{cost}"
    )
    return (
        templates("tenuto.placement.shown")
        .get_template("plan.svg")
        .render(
            title=title,
            bars=_bars(plan),
            legend=[
                (colours[name], name, plan.expected.models[name]) for name in colours if name in plan.expected.models
            ],
            notes=[part for line in _notes(plan) for part in wrap(line, LETTERS, subsequent_indent="\u2003")],
            fills=lambda program: _fills(program, colours),
            tooltip=lambda gpulet, program: _tooltip(gpulet, program, plan),
        )
    )


@dataclass(frozen=True)
class _Bar:
    """One physical GPU, or several with the same gpu-lets. `gpulets` and `instances` (MIG instances by profile) come
    with their start and width in percent of the bar."""

    label: str
    detail: str
    gpulets: Sequence[tuple[Gpulet, float, float]]
    instances: Sequence[tuple[str, float, float]]


def _bars(plan: Plan) -> list[_Bar]:
    by_gpu, on = plan.by_gpu(), dict[str, list[PlannedGpu]]()
    for gpu in plan.gpus:
        on.setdefault(gpu.device, []).append(gpu)
    alike: dict[tuple[object, ...], list[str]] = {}
    for device, places in on.items():
        held = (
            ((g.share_pct, tuple((p.name, p.batch_size) for p in g.programs)) for g in by_gpu[p.id]) for p in places
        )
        what = tuple((p.type, p.instance and p.instance.start, *parts) for p, parts in zip(places, held, strict=True))
        alike.setdefault(what if len(on) > MOST_SINGLE_BARS else (device,), []).append(device)
    return [_bar(on[ids[0]], by_gpu, ids) for ids in alike.values()]


def _bar(places: Sequence[PlannedGpu], by_gpu: Mapping[str, Sequence[Gpulet]], ids: Sequence[str]) -> _Bar:
    first, kind = places[0], places[0].whole_type
    label, detail = (ids[0], kind) if len(ids) == 1 else (f"{len(ids)} GPUs", f"{kind}, {ids[0]} …")
    if first.instance is None:
        return _Bar(label, detail, list(_gpulets(by_gpu[first.id])), ())
    gpulets, instances, at = [], [], 0.0
    for place in sorted(places, key=lambda each: each.instance.start if each.instance is not None else 0):
        size, width = place.cut_as, 100.0 * place.part
        instances.append((place.type if size is None else size.profile, round(at, 3), round(width, 3)))
        inside = _gpulets(by_gpu[place.id])
        gpulets += [
            (g, round(at + begins * width / 100.0, 3), round(part * width / 100.0, 3)) for g, begins, part in inside
        ]
        at += width
    return _Bar(label, detail, gpulets, instances)


def _gpulets(gpulets: Sequence[Gpulet]) -> Iterator[tuple[Gpulet, float, float]]:
    """Yield each gpu-let of a GPU or instance with its start and width in percent. The width is its share; unrestricted
    gpu-lets get equal parts, over-committed ones less."""
    at, total = 0.0, max(100.0, sum(gpulet.effective_share_pct for gpulet in gpulets))
    equal = len(gpulets) > 1 and any(gpulet.share_pct is None for gpulet in gpulets)
    for gpulet in gpulets:
        width = 100.0 / len(gpulets) if equal else 100.0 * gpulet.effective_share_pct / total
        yield gpulet, round(at, 3), round(width, 3)
        at += width


def _colours(plan: Plan) -> dict[str, str]:
    names = [spec.name for spec in plan.models] or [r.name for g in plan.gpulets for r in g.models]
    return {name: PALETTE[index % len(PALETTE)] for index, name in enumerate(dict.fromkeys(names))}


def _fills(program: Program, colours: Mapping[str, str]) -> tuple[str, str, Sequence[str]]:
    """Return the colours of a program's box, of its label, and of the strip below it, if any."""
    shown = [colours.get(replica.name, PALETTE[0]) for replica in program.members]
    if program.is_joint or shown[0] not in PALETTE:
        return JOINT, "#1b1f24", shown
    return shown[0], "#ffffff" if shown[0] in LIGHT_TEXT_ON else "#1b1f24", ()


def _tooltip(gpulet: Gpulet, program: Program, plan: Plan) -> str:
    batch = "one program, joint batch" if program.is_joint else "batch"
    facts = [f"{program.name} on {gpulet.id}: {batch} {program.batch_size}"]
    facts.append("unrestricted" if gpulet.share_pct is None else f"share {gpulet.share_pct:g} %")
    facts += [f"on {len(gpulet.gpus)} GPUs together: {', '.join(gpulet.gpus)}"] if gpulet.also_on else []
    others = [other.name for other in gpulet.programs if other.name != program.name]
    if others:
        facts.append("takes turns with " + ", ".join(others))
    if program.latency_ms is not None:
        specs = [spec for spec in plan.models if spec.name in program.models and not spec.offline]
        slo_ms = min((spec.slo_ms for spec in specs), default=None)
        facts.append(f"{program.latency_ms:.4g} ms" + ("" if slo_ms is None else f" of {slo_ms:g} ms SLO"))
    if hidden_ms := hidden_copies_ms(plan, program) * program.batch_size:
        facts.append(f"{hidden_ms:.4g} ms of it copies that overlap")
    if program.rate_rps is not None:
        facts.append(f"{program.rate_rps:.4g} rps")
    if program.memory_mib is not None:
        facts.append(f"{program.memory_mib:,.0f} MiB")
    return ", ".join(facts)


def _notes(plan: Plan) -> Iterator[str]:
    """Yield the unserved models with reasons, and what frames and colours mean."""
    for name, reason in why_unserved(plan):
        yield f"unserved: {name}: {reason}"
    if any(gpulet.share_pct is None for gpulet in plan.gpulets):
        turns = any(len(gpulet.programs) > 1 for gpulet in plan.gpulets)
        yield "dashed frame: unrestricted gpu-let" + ("; models in one frame take turns" if turns else "")
    if any(gpu.instance is not None for gpu in plan.gpus):
        yield "heavy frame: MIG instance, as wide as its part of the GPU's 7 GPCs"
    if any(gpulet.joint_models for gpulet in plan.gpulets):
        yield "several colours under one label: models that run as one program"
    if plan.streaming:
        yield "streaming: each gpu-let takes the next batch while one executes"
