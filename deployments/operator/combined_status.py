"""The reports of several dispatchers and gateways, combined into one status for operators."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import asdict, replace

from tenuto.deployments.wire.status import (
    ApplicationStatus,
    Buckets,
    ControllerStatus,
    DispatchingStatus,
    FrontDoorStatus,
    GatewayReport,
    GpuletStatus,
    MarginStatus,
    NetworkStatus,
    SystemStatus,
)
from tenuto.outcome import OUTCOMES
from tenuto.placement import Plan


def combine_dispatchers(
    reports: Sequence[DispatchingStatus], plan: Plan | None, gpulets: Sequence[GpuletStatus]
) -> DispatchingStatus:
    """Return one report: the models and schedulers of all, and the largest delays."""
    known = {gpulet.id: gpulet for report in reports for gpulet in report.gpulets}
    networks = [report.network for report in reports if report.network is not None]
    return DispatchingStatus(
        plan=plan.to_data() if plan is not None else None,
        policy=plan.policy.name if plan is not None else None,
        gpulets=[known.get(gpulet.id, gpulet) for gpulet in gpulets],
        models={name: model for report in reports for name, model in report.models.items()},
        network=NetworkStatus(
            max(network.ctrl_ms for network in networks),
            max(network.data_ms_per_request for network in networks),
            max(network.response_ms for network in networks),
        )
        if networks
        else None,
        schedulers=[scheduler for report in reports for scheduler in report.schedulers],
        events=sorted((event for report in reports for event in report.events), key=lambda event: -event.at_s),
    )


def combine_system(
    dispatching: DispatchingStatus,
    reports: Sequence[GatewayReport],
    controller: ControllerStatus | None,
    *,
    version: str,
    now_s: float,
) -> SystemStatus:
    """Return the status of a whole system: the dispatchers' report, each gateway, and the figures of all gateways as
    one. These are the sum of counts, the largest margin, and the GPUs of every node."""
    gateways = sorted((report.gateway for report in reports), key=lambda gateway: gateway.id)
    margins = [gateway.margin for gateway in gateways]
    doors = [gateway.front_door for gateway in gateways]
    reasons = dict.fromkeys(reason for door in doors for reason in door.turned_away)
    proxied: dict[str, Buckets] = {}
    for report in reports:
        for name, histogram in report.proxied.items():
            proxied[name] = _added(proxied.get(name), histogram)
    applications: dict[str, ApplicationStatus] = {}
    for report in reports:
        for name, counts in report.applications.items():
            applications[name] = _with_counts(applications.get(name), counts)
    started_at_s = min(gateway.started_at_s for gateway in gateways)
    models = {name: replace(model, proxy_s=proxied.get(name)) for name, model in dispatching.models.items()}
    return SystemStatus(
        **{**asdict(dispatching), "models": models},
        applications=applications,
        gateways=gateways,
        margin=MarginStatus(
            max(margin.margin_ms for margin in margins),
            max(margin.late_share for margin in margins),
            sum(margin.refused_for_margin for margin in margins),
        ),
        front_door=FrontDoorStatus(
            sum(door.connections for door in doors),
            sum(door.unfinished_bytes for door in doors),
            {reason: sum(door.turned_away.get(reason, 0) for door in doors) for reason in reasons},
            sum(door.wrong_keys for door in doors),
        ),
        started_at_s=started_at_s,
        devices=list({device.uuid: device for report in reports for device in report.devices}.values()),
        version=version,
        uptime_s=now_s - started_at_s,
        controller=controller,
    )


def _with_counts(one: ApplicationStatus | None, other: ApplicationStatus) -> ApplicationStatus:
    """Return the counts of two gateways together."""
    if one is None:
        return other
    summed = (*OUTCOMES, "submitted", "cancelled", "samples", "inferences", "failed_ms")
    return replace(
        other,
        **{name: getattr(one, name) + getattr(other, name) for name in summed},
        last_ms=max(one.last_ms, other.last_ms),
        latency_s=_added(one.latency_s, other.latency_s),
        stage_s={label: _added(one.stage_s.get(label), buckets) for label, buckets in other.stage_s.items()},
        lost_at={label: one.lost_at.get(label, 0) + count for label, count in other.lost_at.items()},
    )


def _added(one: Buckets | None, other: Buckets) -> Buckets:
    """Return the sum of two histograms. When the second has other buckets, as after a changed SLO, return the first."""
    if one is None:
        return other
    if one.le != other.le:
        return one
    return Buckets(one.le, [a + b for a, b in zip(one.counts, other.counts, strict=True)], one.sum + other.sum)
