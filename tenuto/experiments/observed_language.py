"""The thesis' observations on figures 6.10 to 6.14 (section 6.2.2): two vision and two language models."""

from __future__ import annotations

from tenuto.experiments.checks import finding, hosted, missing, near, replica_rows
from tenuto.experiments.experiment import Observation, Results
from tenuto.experiments.facts import thesis_section
from tenuto.experiments.observed_igniter import check_igniter_language

__all__ = ["check_language"]

SLO_MS = 300.0


def check_language(results: Results) -> list[Observation]:
    """Return what became of each observation."""
    return [
        _wao_plan(results), *_wao_bert(results), _usher_gpt2(results), *_wsm(results), _near_optimal(results),
        *check_igniter_language(results),
    ]  # fmt: skip


def _wao_plan(results: Results) -> Observation:
    name, statement = "wao-usher-plan", "WAO-Usher uses three GPUs, each with bert and gpt2"
    published = "3 GPUs, bert and gpt2 on each"
    row = results.row("wao-usher", 8, SLO_MS) or results.row("wao-usher", 6, SLO_MS)
    if row is None:
        return missing(name, statement, published, "equal", "placements")
    gpus = [{model for model, _ in gpu} for gpu in hosted(row).values()]
    is_equal = len(gpus) == 3 and all({"bert", "gpt2"} <= gpu for gpu in gpus)
    ours = "; ".join(", ".join(sorted(gpu)) for gpu in gpus)
    return finding(name, statement, published, ours, is_equal, "equal", "placements")


def _wao_bert(results: Results) -> list[Observation]:
    facts = thesis_section("6.2.2")["observations"]["wao_usher"]
    row = results.row("wao-usher", 3, SLO_MS)
    figure = "WAO-Usher on three GPUs"
    alone_name, alone = "wao-usher-bert", "bert b4 alone on WAO-Usher's share of 31.83 % takes 180 ms instead of 34"
    rate_name, rate = "wao-usher-bert-rate", "a replica of bert serves 22 r/s"
    ms, rps = float(facts["bert_b4_alone_under_its_share_ms"]), float(facts["bert_rps_per_replica"])
    if row is None:
        return [missing(alone_name, alone, f"{ms:g} ms", "within 20 %", figure),
                missing(rate_name, rate, f"{rps:g} r/s", "within 20 %", figure)]  # fmt: skip
    bert = next(r for g in row["plan"]["gpulets"] for r in g["models"] if r["name"] == "bert")
    run = row["runs"]["thesis-router"]
    each = run["models"]["bert"]["throughput_rps"] / max(1, len(replica_rows(run, "bert")))
    why = (
        "on a share s no batch should take longer than 1/s times, here 107 ms; the thesis measured 180 ms, more than "
        "limiting the SMs explains, and gives no cause. Ours is the model of shares, u/s + 1 - u"
    )
    took = bert["latency_ms"]
    return [
        finding(alone_name, alone, f"{ms:g} ms", f"{took:.0f} ms", near(took, ms, 0.2), "within 20 %", figure, why),
        finding(rate_name, rate, f"{rps:g} r/s", f"{each:.0f} r/s beside its neighbours", near(each, rps, 0.2),
                "within 20 %", figure, why + ". Either way bert is overloaded"),
    ]  # fmt: skip


def _usher_gpt2(results: Results) -> Observation:
    name, statement = "usher-gpt2", "Usher on five GPUs serves gpt2 with three replicas on GPUs 0 to 2"
    row = results.row("usher", 5, SLO_MS)
    if row is None:
        return missing(name, statement, "3 replicas on GPUs 0, 1, 2", "equal", "placements")
    where = [gpu for gpu, models in hosted(row).items() if any(model == "gpt2" for model, _ in models)]
    is_equal = [gpu.rpartition("/")[2] for gpu in where] == ["0", "1", "2"]
    return finding(name, statement, "3 replicas on GPUs 0, 1, 2", ", ".join(where), is_equal, "equal", "placements")


def _wsm(results: Results) -> list[Observation]:
    facts = thesis_section("6.2.2")["observations"]["wsm_milp"]["gpus5"]
    name, statement = "wsm-milp-5", "WSM-MILP on five GPUs: resnet50 beside mobilenet_v2, two bert, two gpt2"
    published = f"bert {facts['bert_replicas']}, gpt2 {facts['gpt2_replicas']}, bert {facts['bert_expected_rps']} r/s"
    found = []
    row = results.row("wsm-milp", 5, SLO_MS)
    if row is None:
        found.append(missing(name, statement, published, "equal, rates within 0.1 %", "placements"))
    else:
        gpus = [sorted(model for model, _ in gpu) for gpu in hosted(row).values()]
        expected = row["plan_expected"]["bert"]
        flat = [model for gpu in gpus for model in gpu]
        is_equal = (
            ["mobilenet_v2", "resnet50"] in gpus and flat.count("bert") == 2 and flat.count("gpt2") == 2
            and near(expected, facts["bert_expected_rps"], 0.001)
        )  # fmt: skip
        ours = "; ".join(", ".join(gpu) for gpu in gpus) + f"; bert {expected:.2f} r/s expected"
        found.append(finding(name, statement, published, ours, is_equal, "equal, rates within 0.1 %", "placements"))
    for gpus_count, model in ((6, "gpt2"), (7, "bert")):
        name, statement = (
            f"wsm-milp-{gpus_count}",
            f"WSM-MILP's GPU number {gpus_count} is for a third replica of {model}",
        )
        row = results.row("wsm-milp", gpus_count, SLO_MS)
        if row is None:
            found.append(missing(name, statement, "3 replicas", "equal", "placements"))
            continue
        count = sum(name == model for gpu in hosted(row).values() for name, _ in gpu)
        ours = f"{count} replicas"
        found.append(finding(name, statement, "3 replicas", ours, count == 3, "equal", "placements"))
    return found


def _near_optimal(results: Results) -> Observation:
    name, statement = "wsm-milp-optimal", "WSM-MILP on seven GPUs is near the optimum"
    run = results.run("wsm-milp", 7, SLO_MS)
    tolerance = "at least 95 % of what was sent in time"
    if run is None:
        return missing(name, statement, "near optimal", tolerance, "Goodput")
    ours = f"{run['goodput_rps']:.0f} of {run['offered_rps']:.0f} r/s"
    return finding(
        name, statement, "near optimal", ours, run["goodput_rps"] >= 0.95 * run["offered_rps"], tolerance, "Goodput"
    )
