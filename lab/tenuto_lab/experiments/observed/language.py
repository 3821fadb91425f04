"""The thesis' claims on figures 6.10 to 6.14 (section 6.2.2): two vision and two language models, SLO 300 ms."""

from __future__ import annotations

from tenuto_lab.experiments.experiment import Results
from tenuto_lab.experiments.facts import thesis_section
from tenuto_lab.experiments.observed.claim import GOODPUT, Claim, Seen, claim, hosted, near, pairs_of
from tenuto_lab.experiments.observed.igniter import LANGUAGE as IGNITER

SLO_MS = 300.0
WAO = "WAO-Usher on three GPUs"
BERT = thesis_section("6.2.2")["observations"]["wao_usher"]
FIVE = thesis_section("6.2.2")["observations"]["wsm_milp"]["gpus5"]
BERT_WHY = (
    "on a share s no batch should take longer than 1/s times, here 107 ms; the thesis measured 180 ms, more than "
    "limiting the SMs explains, and gives no cause. Ours is the model of shares, u/s + 1 - u"
)


@claim("wao-usher-plan", "WAO-Usher uses three GPUs, each with bert and gpt2", "3 GPUs, bert and gpt2 on each")
def _wao_plan(results: Results) -> Seen:
    row = results.find("wao-usher", 8, SLO_MS) or results.row("wao-usher", 6, SLO_MS)
    gpus = [{model for model, _ in gpu} for gpu in hosted(row).values()]
    ours = "; ".join(", ".join(sorted(gpu)) for gpu in gpus)
    return Seen(ours, len(gpus) == 3 and all({"bert", "gpt2"} <= gpu for gpu in gpus))


@claim(
    "wao-usher-bert",
    "bert b4 alone on WAO-Usher's share of 31.83 % takes 180 ms instead of 34",
    f"{BERT['bert_b4_alone_under_its_share_ms']:g} ms",
    "within 20 %",
    WAO,
)
def _wao_bert(results: Results) -> Seen:
    row = results.row("wao-usher", 3, SLO_MS)
    took = next(r for g in row["plan"]["gpulets"] for r in g["models"] if r["name"] == "bert")["latency_ms"]
    return Seen(f"{took:.0f} ms", near(took, BERT["bert_b4_alone_under_its_share_ms"], 0.2), BERT_WHY)


@claim(
    "wao-usher-bert-rate",
    "a replica of bert serves 22 r/s",
    f"{BERT['bert_rps_per_replica']:g} r/s",
    "within 20 %",
    WAO,
)
def _wao_bert_rate(results: Results) -> Seen:
    bert = results.run("wao-usher", 3, SLO_MS)["models"]["bert"]
    each = bert["throughput_rps"] / max(1, len(bert["replicas"]))
    is_near = near(each, BERT["bert_rps_per_replica"], 0.2)
    return Seen(f"{each:.0f} r/s beside its neighbours", is_near, BERT_WHY + ". Either way bert is overloaded")


@claim("usher-gpt2", "Usher on five GPUs serves gpt2 with three replicas on GPUs 0 to 2", "3 replicas on GPUs 0, 1, 2")
def _usher_gpt2(results: Results) -> Seen:
    gpus = hosted(results.row("usher", 5, SLO_MS)).items()
    where = [gpu for gpu, models in gpus if any(model == "gpt2" for model, _ in models)]
    return Seen(", ".join(where), [gpu.rpartition("/")[2] for gpu in where] == ["0", "1", "2"])


@claim(
    "wsm-milp-5",
    "WSM-MILP on five GPUs: resnet50 beside mobilenet_v2, two bert, two gpt2",
    f"bert {FIVE['bert_replicas']}, gpt2 {FIVE['gpt2_replicas']}, bert {FIVE['bert_expected_rps']} r/s",
    "equal, rates within 0.1 %",
)
def _wsm_five(results: Results) -> Seen:
    row = results.row("wsm-milp", 5, SLO_MS)
    gpus = [sorted(model for model, _ in gpu) for gpu in hosted(row).values()]
    flat = [model for gpu in gpus for model in gpu]
    expected = row["plan_expected"]["bert"]
    is_equal = (
        ["mobilenet_v2", "resnet50"] in gpus
        and flat.count("bert") == 2
        and flat.count("gpt2") == 2
        and near(expected, FIVE["bert_expected_rps"], 0.001)
    )
    return Seen("; ".join(", ".join(gpu) for gpu in gpus) + f"; bert {expected:.2f} r/s expected", is_equal)


def _third_replica(gpus: int, model: str) -> Claim:
    @claim(f"wsm-milp-{gpus}", f"WSM-MILP's GPU number {gpus} is for a third replica of {model}", "3 replicas")
    def look(results: Results) -> Seen:
        count = sum(name == model for name, _ in pairs_of(results.row("wsm-milp", gpus, SLO_MS)))
        return Seen(f"{count} replicas", count == 3)

    return look


@claim(
    "wsm-milp-optimal",
    "WSM-MILP on seven GPUs is near the optimum",
    "near optimal",
    "at least 95 % of what was sent in time",
    GOODPUT,
)
def _near_optimal(results: Results) -> Seen:
    run = results.run("wsm-milp", 7, SLO_MS)
    ours = f"{run['goodput_rps']:.0f} of {run['offered_rps']:.0f} r/s"
    return Seen(ours, run["goodput_rps"] >= 0.95 * run["offered_rps"])


LANGUAGE: tuple[Claim, ...] = (
    _wao_plan,
    _wao_bert,
    _wao_bert_rate,
    _usher_gpt2,
    _wsm_five,
    _third_replica(6, "gpt2"),
    _third_replica(7, "bert"),
    _near_optimal,
    *IGNITER,
)
