"""How much slower a batch runs in an experiment because of a limited share, and because of neighbours.

`Emulation.notes` says which source was used where.

* Share: for the models of igniter-v100 (V100, TensorRT), its measured ratio, on the line between measured batch sizes
  and shares, which goes on below the smallest share; at most batch 32. For others l(b) * (u / s + 1 - u), with u the
  time-weighted SM utilisation of the thesis' table A.1 and s the share: the part of the time in which all SMs work
  grows with 1/s, the rest does not.
* Neighbours with shares (CUDA MPS): the measured pair nearest in batch sizes and share of the 600 pairs of
  `v100_interference_pairs.json`; elsewhere the mean slowdown of all of them. Several neighbours add up.
* Neighbours without shares take turns in time slices: n running neighbours make a batch take n + 1 times as long.
  This is the thesis' own observation for resnet50 beside alexnet: alexnet runs 18 % of the time, 6.8 ms become 8 ms.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from functools import cache
from statistics import fmean

from tenuto.placement import Gpulet, Plan, Replica
from tenuto.profiles import LatencyTable, ModelProfile, Profile
from tenuto.profiles.share_latency import SM_UTILISATION, utilisation_factor
from tenuto.profiles.shipped import load_shipped
from tenuto_lab.experiments.facts import read_data
from tenuto_lab.interference.measurements import Sample, pair_samples


@cache
def measured_pairs() -> list[Sample]:
    """Return the 1,200 published slowdowns of the iGniter repository's 600 pairs on a V100."""
    models = load_shipped("igniter-v100").models
    return pair_samples(read_data("v100_interference_pairs.json"), models, origin="v100_interference_pairs")


@cache
def _measured() -> tuple[Mapping[str, ModelProfile], Mapping[tuple[str, str], list[Sample]], float]:
    """Return the measured models, the samples by (model, neighbour), and the mean slowdown of all samples."""
    samples = measured_pairs()
    by_pair: dict[tuple[str, str], list[Sample]] = defaultdict(list)
    for sample in samples:
        by_pair[sample.models[0], sample.models[1]].append(sample)
    return load_shipped("igniter-v100").models, by_pair, fmean(max(1.0, sample.slowdown) for sample in samples)


class Emulation:
    """Costs of sharing on the thesis' GPUs. `notes` collects what was measured and what is modelled."""

    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        self.notes: dict[str, None] = {}

    def share_factor(self, model: str, batch_size: int, share_pct: float) -> float:
        """Return latency on the share over latency on the whole GPU, at least 1."""
        if share_pct >= 100.0:
            return 1.0
        measured = _measured()[0].get(model)
        if measured is not None:
            size = min(batch_size, max(measured.batch_sizes(100.0)))
            return max(1.0, self._on_share(model, measured, size, share_pct) / measured.latency_ms(size, 100.0))
        self.notes[f"{model}: slowdown by its share modelled from its SM utilisation"] = None
        return utilisation_factor(self._utilisation(model, batch_size), share_pct)

    def _on_share(self, model: str, measured: ModelProfile, batch_size: int, share_pct: float) -> float:
        """Return the measured latency in ms; below the smallest measured share the line in 1/share goes on."""
        least, next_one = measured.shares()[:2]
        if share_pct >= least:
            self.notes[f"{model}: slowdown by its share as measured (igniter-v100)"] = None
            return measured.latency_ms(batch_size, share_pct)
        self.notes[f"{model}: slowdown by a share below {least:g} % on the line of the two smallest measured"] = None
        at_least, at_next = (measured.latency_ms(batch_size, share) for share in (least, next_one))
        slope = (at_least - at_next) / (1.0 / least - 1.0 / next_one)
        return at_least + max(0.0, slope) * (1.0 / share_pct - 1.0 / least)

    def alone(self, replica: Replica) -> dict[int, float]:
        """Return l(b) in ms of a replica alone on the whole GPU, up to its batch size.

        Beyond the largest measured batch the line through the two largest goes on; a note says so.
        """
        profile = self._profile.models[replica.name]
        latency = profile.latency()
        points = {size: profile.latency_ms(size) for size in profile.batch_sizes() if size < replica.batch_size}
        sizes = profile.batch_sizes()
        if replica.batch_size <= sizes[-1]:
            points[replica.batch_size] = latency.at(replica.batch_size)
        else:
            small, large = sizes[-2], sizes[-1]
            slope = (points[large] - points[small]) / (large - small)
            points[replica.batch_size] = points[large] + slope * (replica.batch_size - large)
            self.notes[f"{replica.name}: batches above {large} on the line of the two largest measured"] = None
        return points

    def _utilisation(self, model: str, batch_size: int) -> float:
        """Return the time-weighted SM utilisation at the smallest measured batch that is no smaller; 100 if unknown."""
        profile = self._profile.models.get(model)
        points = [p for p in profile.points if p.share_pct == 100.0 and SM_UTILISATION in p.metrics] if profile else []
        above = [p for p in points if p.batch_size >= batch_size] or points[-1:]
        return above[0].metrics[SM_UTILISATION] if above else 100.0

    def neighbour_factor(self, own: tuple[Replica, float], other: tuple[Replica, float]) -> float:
        """Return the slowdown by one neighbour that runs all the time, both on shares in percent."""
        replica, share = own
        neighbour, _ = other
        _, by_pair, mean = _measured()
        samples = by_pair.get((replica.name, neighbour.name))
        if not samples:
            self.notes[f"{replica.name} beside {neighbour.name}: mean of all measured pairs, {mean:.3f}"] = None
            return mean

        def distance(sample: Sample) -> tuple[float, float]:
            sizes = abs(sample.gpulet.batch_size - replica.batch_size)
            return sizes + abs(sample.neighbours[0].batch_size - neighbour.batch_size), abs(
                sample.gpulet.share_pct - share
            )

        nearest = min(samples, key=distance)
        self.notes[f"{replica.name} beside {neighbour.name}: the nearest measured pair"] = None
        return max(1.0, nearest.slowdown)

    def slowdown(self, replica: Replica, gpulet: Gpulet, others: list[Gpulet]) -> float:
        """Return the factor while all neighbours run."""
        if not others:
            return 1.0
        if gpulet.share_pct is None or any(other.share_pct is None for other in others):
            self.notes["gpu-lets without shares take turns in time slices"] = None
            return 1.0 + len(others)
        own = (replica, gpulet.share_pct)
        excess = 0.0
        for other in others:
            worst = max(self.neighbour_factor(own, (r, other.effective_share_pct)) for r in other.models)
            excess += worst - 1.0
        return 1.0 + excess


def emulated_plan(plan: Plan, emulation: Emulation) -> Plan:
    """Return the plan with the latencies and slowdowns with which its gpu-lets are emulated.

    Placement, batch sizes and shares stay. A policy's own figures for interference are replaced, because here the
    policy is judged.
    """
    by_gpu = plan.by_gpu()
    gpulets = []
    for gpulet in plan.gpulets:
        others = [other for other in by_gpu[gpulet.gpu] if other.id != gpulet.id]
        replicas = []
        for replica in gpulet.models:
            latency = emulation.alone(replica)
            factor = emulation.share_factor(replica.name, replica.batch_size, gpulet.effective_share_pct)
            points = {size: round(ms * factor, 6) for size, ms in latency.items()}
            update = {
                "latency": LatencyTable(points=points),
                "latency_ms": points[replica.batch_size],
                "slowdown": emulation.slowdown(replica, gpulet, others),
            }
            replicas.append(replica.model_copy(update=update))
        gpulets.append(gpulet.model_copy(update={"models": tuple(replicas)}))
    return plan.model_copy(update={"gpulets": tuple(gpulets)})
