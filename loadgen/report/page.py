"""The page: one self-contained HTML file that opens without network, in light and dark, on a phone and on paper."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from tenuto.loadgen.report import sections
from tenuto.loadgen.report.palette import Style, colour_css, styles_for
from tenuto.loadgen.report.placed import placement_picture
from tenuto.loadgen.report.run import Run

__all__ = ["render_page"]

_LIGHT = "--back:#ffffff;--panel:#f6f7f9;--text:#1a1c20;--muted:#6a7078;--rule:#d9dde3;"
_DARK = "--back:#14161a;--panel:#1d2026;--text:#e8eaee;--muted:#9aa1ab;--rule:#363b44;"
_STYLE = """
*{box-sizing:border-box}
body{margin:0 auto;max-width:1320px;padding:1.2rem;background:var(--back);color:var(--text);
 font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
h1{font-size:1.5rem;margin:0 0 .2rem}h2{font-size:1.1rem;margin:2rem 0 .6rem}
.verdict{border-left:.5rem solid var(--muted);background:var(--panel);padding:.8rem 1rem;margin:1rem 0}
.verdict strong{font-size:1.25rem}.verdict ul{margin:.4rem 0 0;padding-left:1.2rem}
.PASS{border-color:var(--ok)}.FAIL{border-color:var(--expired)}.INVALID{border-color:var(--rejected)}
.grid{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,380px),1fr));gap:1rem;align-items:start}
figure{margin:0;background:var(--panel);padding:.7rem .7rem .5rem;border-radius:.4rem;min-width:0;break-inside:avoid}
figure.wide{grid-column:1/-1}figcaption{font-weight:600;margin-bottom:.3rem}
.chart{width:100%;height:auto;display:block}
svg text{font:12px system-ui,sans-serif;fill:var(--text)}svg text.name{font-weight:600}
svg text.shared{font-size:11px;fill:var(--muted)}svg text.hosted{font-size:11px}
.chart .grid{stroke:var(--rule);stroke-width:1}.chart .axis{stroke:var(--muted);stroke-width:1}
.chart .mark{stroke:var(--text);stroke-width:1.2;stroke-dasharray:4 3}.chart .marked{font-weight:600;paint-order:stroke;stroke:var(--panel);stroke-width:4px;stroke-linejoin:round}
.chart .track{fill:var(--rule);opacity:.45}.chart .gpulet{fill:var(--back);stroke:var(--muted)}
.legend{display:flex;flex-wrap:wrap;gap:.15rem .9rem;font-size:.85rem;margin-bottom:.3rem}
.legend span{display:inline-flex;align-items:center;gap:.35rem}
.note,.unit{color:var(--muted);font-size:.82rem;margin:.3rem 0 0}.unit{text-align:center;margin:0}
.scroll{overflow-x:auto}table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums;font-size:.9rem}
th,td{padding:.3rem .6rem;text-align:right;border-bottom:1px solid var(--rule);white-space:nowrap}
th:first-child,td:first-child,th.word,td.word,.left td,.left th{text-align:left}td i{display:inline-block;width:.75em;height:.75em;
 border-radius:2px;margin-right:.45em}
.left td{white-space:normal;overflow-wrap:anywhere}.left th{width:14rem;vertical-align:top}
.gpus{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,360px),1fr));gap:.6rem}
code{font-size:.85em;overflow-wrap:anywhere}
@media (max-width:600px){body{padding:.7rem}.left th{width:8rem}}
@media print{body{max-width:none;padding:0;font-size:11px}figure,.verdict{border:1px solid var(--rule);background:none}
 .grid{grid-template-columns:1fr 1fr}h2{break-after:avoid}*{-webkit-print-color-adjust:exact;print-color-adjust:exact}}
"""


def render_page(run: Run) -> str:
    """Return the whole page as text."""
    styles = styles_for(run.names)
    document = run.document
    title = f"{document['verdict']['result']} · {document['goodput_rps']:.1f} rps goodput · Tenuto"
    charts = (
        '<h2>Goodput and latency</h2><div class="grid">'
        + sections.goodput(run, styles) + sections.latency(run, styles) + sections.stages(run) + sections.load(run)
        + '</div><h2>Batches</h2><div class="grid">' + sections.batches(run, styles)
        + "</div>" + _placement(run, styles)
        + '<h2>Execution against the plan</h2><div class="grid">' + sections.executions(run, styles)
        + sections.utilisation(run) + "</div>"
    )  # fmt: skip
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        '<meta name="color-scheme" content="light dark">'
        f"<title>{escape(title)}</title><style>:root{{{_LIGHT}{colour_css(dark=False)}}}"
        f"@media screen and (prefers-color-scheme:dark){{:root{{{_DARK}{colour_css(dark=True)}}}}}{_STYLE}</style></head><body>"
        f"<h1>{escape(_headline(document))}</h1><p class=note>{escape(run.label)} · {escape(str(document.get('date', '')))}</p>"
        f"{_verdict(document)}<h2>Models</h2>{_models(run, styles)}{charts}{_provenance(run)}</body></html>\n"
    )


def _headline(document: Mapping[str, Any]) -> str:
    share = "nothing offered" if document["attainment"] is None else f"{100 * document['attainment']:.2f} % in time"
    return f"{document['goodput_rps']:.1f} of {document['offered_rps']:.1f} requests per second, {share}"


def _verdict(document: Mapping[str, Any]) -> str:
    verdict = document["verdict"]
    reasons = [*verdict["reasons"], *(f"failures: {line}" for line in document.get("errors", []))]
    listed = "".join(f"<li>{escape(reason)}</li>" for reason in reasons)
    conditions = verdict.get("conditions", {})
    lines = []
    is_live = document.get("kind") != "simulation"
    if is_live and "sent" in conditions:
        lines.append(f"Sent {conditions['sent']} of {conditions['scheduled']} scheduled requests.")
    if is_live and conditions.get("lateness_p99_ms") is not None:
        lines.append(
            f"The generator was late by {conditions['lateness_p99_ms']:.2f} ms at the 99th percentile; "
            f"{conditions['lateness_limit_ms']:.1f} ms are allowed."
        )
    lines.append(f"PASS needs {100 * conditions.get('target_attainment', 0.99):g} % of every model's requests in time.")
    return (
        f'<div class="verdict {escape(verdict["result"])}"><strong>{escape(verdict["result"])}</strong>'
        f"<ul>{listed}</ul><p class=note>{escape(' '.join(lines))}</p></div>"
    )


def _models(run: Run, styles: Mapping[str, Style]) -> str:
    heads = ("model", "SLO ms", "offered", "ok", "late", "expired", "rejected", "failed", "in time", "p50 ms", "p90 ms", "p99 ms",
             "mean batch")
    rows = []
    for name, model in run.document["models"].items():
        slo = run.slo_ms(name)
        cells = [
            f'<i style="background:{styles[name].colour}"></i>{escape(name)}', "–" if slo is None else f"{slo:g}",
            *(str(model[key]) for key in ("offered", "ok", "late", "expired", "rejected", "failed")),
            "–" if model["attainment"] is None else f"{100 * model['attainment']:.2f} %",
            *("–" if model[key] is None else f"{model[key]:.1f}" for key in ("p50_ms", "p90_ms", "p99_ms", "mean_batch")),
        ]  # fmt: skip
        rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    head = "".join(f"<th>{text}</th>" for text in heads)
    return (
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'
        '<p class="note">p99 is given from 459 requests on.</p>'
    )


def _placement(run: Run, styles: Mapping[str, Style]) -> str:
    if run.plan is None or not run.plan.gpulets:
        return ""
    policy = run.plan.policy.name
    return f"<h2>Placement by {escape(policy)}</h2>{placement_picture(run.plan, styles)}"


def _provenance(run: Run) -> str:
    document = run.document
    hardware = document.get("hardware") or {}
    rows = {
        "command": " ".join(document.get("command", [])),
        "settings": ", ".join(f"{key} {value}" for key, value in document["options"].items() if value is not None),
        "schedule (SHA-256)": document.get("schedule_hash", ""),
        "hardware": ", ".join(f"{key} {value}" for key, value in hardware.items() if value),
        "versions": ", ".join(f"{key} {value}" for key, value in (document.get("versions") or {}).items()),
        "measured window": f"{run.begin_ms / 1000:g} s to {run.end_ms / 1000:g} s",
        "requests": str(document.get("requests", len(run.records))),
    }
    listed = "".join(f"<tr><th>{escape(key)}</th><td><code>{escape(text)}</code></td></tr>" for key, text in rows.items() if text)
    remarks = [*document.get("schedule_notes", []), *(run.plan.notes if run.plan is not None else ())]
    notes = "".join(f"<li>{escape(note)}</li>" for note in remarks)
    return f'<h2>How it was made</h2><table class="left"><tbody>{listed}</tbody></table>' + (f"<ul>{notes}</ul>" if notes else "")
