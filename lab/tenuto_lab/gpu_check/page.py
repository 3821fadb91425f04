"""The page of a check: what was possible on this machine, and every figure with its source."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tenuto.errors import TenutoError
from tenuto.profiles.profile import Profile
from tenuto_lab.gpu_check.results import Results
from tenuto_lab.gpu_check.steps import CALLS

VIRTUAL_DRIVER = "virtual"
"""The driver of a GPU that is not there."""

_SPEEDS = {
    "plain": "fp32, nothing that changes a result",
    "eager": "what is fast here, without CUDA graphs",
    "fast": "what is fast here",
}


def report_page(results: Results) -> str:
    """Return the page in Markdown, from the files that are there."""
    return "\n".join(line for part in _PARTS for line in part(results)).rstrip() + "\n"


def _head(results: Results) -> Iterator[str]:
    gpu = results.read("inventory.json")
    yield f"# What `scripts/gpu_check` found on {gpu.get('name', 'this machine')}"
    yield ""
    if not gpu:
        yield "There is no usable GPU."
        return
    if gpu.get("driver") == VIRTUAL_DRIVER:
        yield "**A dry run on a virtual GPU: it shows that every step runs. No figure on this page was measured.**"
        yield ""
    packages = {name: version for name, version in gpu.get("packages", {}).items() if version}
    yield (
        f"{gpu['name']} ({gpu['type']}), {gpu['sm_count']} SMs, {gpu['memory_mib']} MiB, compute capability "
        f"{gpu['compute_capability']}, compute mode {gpu['compute_mode']}, driver {gpu['driver']}; {gpu.get('date')}, "
        f"Python {gpu.get('python')}, {', '.join(f'{name} {version}' for name, version in packages.items())}."
    )
    absent = [name for name, path in gpu.get("programs", {}).items() if path is None]
    if absent:
        yield f"Not installed: {', '.join(absent)}."
    mps = results.read("mps.json")
    if mps:
        yield "CUDA MPS can be used." if mps.get("is_usable") else f"Without CUDA MPS: {mps.get('reason')}."
    yield ""


def _speeds(results: Results) -> Iterator[str]:
    found = {name: profile for name in _SPEEDS if (profile := _profile(results, f"speed-{name}.yaml")) is not None}
    if not found:
        return
    yield from _title("Precision and graphs")
    yield from _heads("how", "model", "batch", "batch ms", "its kernels ms", "rows/s", "repeats within %")
    for name, profile in found.items():
        for row, model in profile.models.items():
            for point in model.points:
                metrics = point.metrics
                yield _row(
                    _SPEEDS[name],
                    row,
                    point.batch_size,
                    _ms(point.latency_ms),
                    _ms(metrics.get("kernels_ms")),
                    f"{point.batch_size / point.latency_ms * 1e3:.0f}",
                    _ms(metrics.get("repeat_pct")),
                )
    yield ""
    for name, profile in found.items():
        for model in profile.models.values():
            if model.run is not None:
                yield f"- {_SPEEDS[name]}: {', '.join(f'{key} {value}' for key, value in model.run.items())}"
    yield ""


def _end_to_end(results: Results) -> Iterator[str]:
    found = results.read("served.json")
    ways = {way: r for way, r in found.items() if isinstance(r, dict)}
    if not ways:
        return
    yield from _title("Served end to end, without Ray")
    yield f"{found['model']}, batches of {found['batch_size']}; a gpu-let in its own process, requests always waiting."
    yield ""
    yield from _heads(
        "batches", "rows/s", "of its batches alone", "part", "mean batch", "batch ms", "round trip ms", "not ok"
    )
    for way, r in ways.items():
        if "failed" in r:
            yield _row(way, r["failed"], *[""] * 6)
            continue
        yield _row(
            way,
            r["rows_per_s"],
            r["rows_per_s_of_batches_alone"],
            r["part_of_it"],
            r["mean_batch"],
            r["execution_ms"],
            r["round_trip_ms"],
            r["not_ok"],
        )
    yield ""


def _mps(results: Results) -> Iterator[str]:
    found = results.read("sharing.json")
    shares = {name: r for name, r in found.items() if name.startswith("share ") and "failed" not in r}
    if found:
        yield from _title("CUDA MPS")
    if shares:
        yield from _heads("share", "SMs seen", "share of the SMs", "at or below", "client")
        for name, r in shares.items():
            yield _row(
                name.removeprefix("share "),
                r["sm_count"],
                r["share_of_sms"],
                "yes" if r["at_or_below"] else "NO",
                "yes" if r["listed_as_client"] else "NO",
            )
        yield ""
    for name, result in found.items():
        if name not in shares:
            yield f"**{name[:1].upper()}{name[1:]}**"
            yield ""
            yield from _items(result)


def _streaming(results: Results) -> Iterator[str]:
    files = {"default connections": "streaming.json"} | {f"{n} connections": f"connections-{n}.json" for n in (2, 4, 8)}
    rows = [
        (name, how, figures)
        for name, file in files.items()
        for how, figures in results.read(file).items()
        if isinstance(figures, dict)
    ]
    if not rows:
        return
    yield from _title("Streamed against plain batches")
    yield from _heads("MPS", "how", "plain ms", "streamed ms", "ratio", "what it says")
    for name, how, r in rows:
        figures = (_ms(r.get("plain_ms")), _ms(r.get("streaming_ms")), _ms(r.get("ratio")))
        yield _row(name, how, *figures, r.get("failed") or r.get("reason") or "")
    yield ""


def _green(results: Results) -> Iterator[str]:
    found = results.read("green-contexts.json")
    if not found:
        return
    yield from _title("Latency against SMs, by green contexts")
    if "failed" in found:
        yield from _items(found)
        return
    yield f"{found['model']}, batch {found['batch_size']}, one process, nothing beside it."
    yield ""
    yield from _heads("SMs", "kernels ms", "spread ms")
    for point in found["points"]:
        yield _row(f"{point['sms']} of {found['whole_sms']}", point["kernels_ms"], point["spread_ms"])
    yield ""


def _grid(results: Results) -> Iterator[str]:
    gpu = results.read("inventory.json")
    name = f"profile-{gpu.get('type', 'gpu')}.yaml"
    profile = _profile(results, name)
    if profile is None:
        return
    yield from _title(f"Profile `{name}`")
    yield from _heads("model", "points", "shares %", "doubts")
    for row, model in profile.models.items():
        shares = ", ".join(f"{share:g}" for share in model.shares())
        yield _row(row, len(model.points), shares, "; ".join(model.doubts))
    yield ""
    if profile.co_runs:
        yield f"{len(profile.co_runs)} co-runs. Coefficients of the hardware: {dict(profile.coefficients) or 'none'}."
        yield ""


def _occupancy(results: Results) -> Iterator[str]:
    found = results.read("occupancy.json")
    if found:
        yield from _title("Occupancy: hardware counters beside the estimate")
        yield from _items({key: value for key, value in found.items() if key != "per_kernel"})


def _steps(results: Results) -> Iterator[str]:
    done = results.read("steps.json")
    if not done:
        return
    yield from _title("Steps")
    for call, what in CALLS.items():
        mine = {name: r for name, r in done.items() if r["call"] == call}
        if not mine:
            continue
        yield f"**{call}: {what}**"
        yield ""
        for name, r in mine.items():
            said = r.get("failed") or r.get("left_out")
            said = f"{'left out: ' if 'left_out' in r else ''}{said}" if said else f"done in {r['took_s']} s"
            yield f"- {name}: {said}; `{r['command']}`"
        yield ""


_PARTS = (_head, _speeds, _end_to_end, _mps, _streaming, _green, _grid, _occupancy, _steps)


def _profile(results: Results, name: str) -> Profile | None:
    path = results.path(name)
    try:
        return Profile.load(path) if path.exists() else None
    except TenutoError:
        return None


def _title(text: str) -> tuple[str, str]:
    return f"## {text}", ""


def _items(found: Mapping[str, Any]) -> Iterator[str]:
    for key, value in found.items():
        yield f"- {key.replace('_', ' ')}: {value}"
    yield ""


def _heads(*names: str) -> tuple[str, str]:
    return _row(*names), "|" + "---|" * len(names)


def _row(*cells: Any) -> str:
    return "| " + " | ".join(str(cell).replace("|", "/") for cell in cells) + " |"


def _ms(value: Any) -> str:
    return "" if value is None else f"{value:.2f}"
