"""A made-up server for what operators look at: as many models and gpu-lets as wanted, counting up second by second.
Requests of a few models vary in size."""

from __future__ import annotations

from typing import Any

import msgspec

from tenuto.deployments.dispatch.histogram import BATCH_SIZES, Histogram, buckets_around
from tenuto.deployments.operator.live_view import LiveView
from tenuto.deployments.wire.status import SystemStatus

__all__ = ["ShownServer", "WatchedServer"]


class ShownServer:
    """`second` moves it on; `status` is what `GET /status` would say. The same calls give the same answers."""

    def __init__(self, models: int = 50, gpulets: int = 100, *, per_gpu: int = 4) -> None:
        self.seconds = 0
        self._models = {f"network_{index:02d}": _Model(index) for index in range(models)}
        self._gpulets = [(f"n0/{i // per_gpu}/{'abcdefgh'[i % per_gpu]}", f"n0/{i // per_gpu}") for i in range(gpulets)]
        self._share = 100.0 / per_gpu
        self._applications = {name: _Application() for name in ("traffic", "ocr")}

    def second(self) -> None:
        """Let a second pass."""
        self.seconds += 1
        for model in self._models.values():
            model.second(self.seconds)
        for application in self._applications.values():
            application.second()

    def rename(self, model: str, name: str) -> None:
        """Call a model something else."""
        self._models = {name if each == model else each: value for each, value in self._models.items()}

    def status(self) -> SystemStatus:
        """Return everything that operators can be shown."""
        return msgspec.convert(self._data(), SystemStatus)

    def _data(self) -> dict[str, Any]:
        names = list(self._models)
        gpulets = []
        for index, (gpulet, gpu) in enumerate(self._gpulets):
            hosted = {names[index % len(names)]: 8, names[(index * 7 + 1) % len(names)]: 4}
            busy_s = self.seconds * (0.2 + 0.7 * (index % 10) / 10)
            gpulets.append(
                {
                    "id": gpulet,
                    "gpu": gpu,
                    "up": index != 5,
                    "share_pct": self._share,
                    "emulated": True,
                    "device": "emulated v100",
                    "models": hosted,
                    "busy_s": busy_s,
                    "batches": 40 * self.seconds,
                    "predicted_s": busy_s * (0.9 + 0.02 * (index % 7)),
                    "lost": int(index == 5),
                    "running": [{"program": next(iter(hosted)), "batch_size": 1 + index % 8}] if index % 3 else [],
                }
            )
        return {
            "version": "0.1.0",
            "started_at_s": 1.79e9,
            "uptime_s": float(self.seconds),
            "plan": {
                "policy": {"name": "tenuto"},
                "gpus": [{"id": "spare/0"}, {"id": "n9/0"}],
                "drained": ["n9"],
                "idle": {"rare": 24.3},
            },
            "policy": "tenuto",
            "schedulers": [
                {"hold": 0.7, "defend": 1.0, "rehearsals": 12, "expected_gain": 0.008, "expected_spared": 0.1}
            ],
            "gpulets": gpulets,
            "models": {name: model.to_data() for name, model in self._models.items()},
            "applications": {name: each.to_data() for name, each in self._applications.items()},
            "network": {"ctrl_ms": 0.8, "data_ms_per_request": 0.01, "response_ms": 3.0},
            "gateways": [
                {
                    "id": f"n0:{pid}",
                    "started_at_s": 1.79e9,
                    "margin": {"margin_ms": 1.2, "late_share": 0.004, "refused_for_margin": 8 + pid % 2},
                    "front_door": {
                        "connections": 32,
                        "unfinished_bytes": 1 << 19,
                        "turned_away": {"key": 1, "rate": 2},
                        "wrong_keys": 1,
                    },
                }
                for pid in (4001, 4002)
            ],
            "margin": {"margin_ms": 1.2, "late_share": 0.004, "refused_for_margin": 17},
            "front_door": {
                "connections": 64,
                "unfinished_bytes": 1 << 20,
                "turned_away": {"key": 3, "rate": 5},
                "wrong_keys": 2,
            },
            "controller": {
                "mode": "act",
                "paused": False,
                "decisions": {"changed": 2, "kept": 9},
                "log": [
                    {
                        "at_s": 1.79e9 + 40,
                        "what": "changed",
                        "why": "network_07 comes at 1.4 times its planned rate; gains "
                        "38 r/s in time for 12 s of loading",
                    },
                    {"at_s": 1.79e9 + 10, "what": "kept", "why": "the gain of 2 r/s does not pay a restart"},
                ],
            },
            "events": [
                {"at_s": 1.79e9 + 55, "what": "gpu-let lost", "why": "n0/1/b: its process ended"},
                {"at_s": 1.79e9, "what": "plan applied", "why": "100 gpu-lets, 50 models, policy tenuto"},
            ],
            "devices": [
                {
                    "uuid": "GPU-1",
                    "name": "H200",
                    "memory_used_bytes": 5e9,
                    "memory_total_bytes": 1.5e11,
                    "utilization_ratio": 0.6,
                    "power_watts": 420.0,
                    "sm_clock_hertz": 1.98e9,
                    "temperature_celsius": 61.0,
                    "xid_errors": 0,
                }
            ],
        }


class WatchedServer:
    """A view of a shown server, on a clock that moves when the view waits and when a test says so."""

    def __init__(self, server: ShownServer, *, moves: bool = True) -> None:
        """`moves`: the server counts a second whenever it is asked."""
        self.now_s = 0.0
        self.asked = 0
        self._server, self._moves = server, moves
        self.view = LiveView(self._status, clock=lambda: self.now_s, sleep=self._sleep)

    async def _status(self) -> SystemStatus:
        self.asked += 1
        if self._moves:
            self._server.second()
        return self._server.status()

    async def _sleep(self, seconds: float) -> None:
        self.now_s += seconds

    async def sample(self, count: int) -> None:
        """Sample once a second, so often."""
        for _ in range(count):
            self.now_s += 1.0
            await self.view.sample()


class _Application:
    """Two stages of 40 and 120 ms; of 50 requests a second two are lost at the second one."""

    def __init__(self) -> None:
        self._seconds = 0
        self._latency_s = Histogram(buckets_around(400.0))
        self._stage_s = {"detect": Histogram(buckets_around(400.0)), "recognise": Histogram(buckets_around(400.0))}

    def second(self) -> None:
        self._seconds += 1
        for histogram, took_s in ((self._latency_s, 0.16), *zip(self._stage_s.values(), (0.04, 0.12), strict=True)):
            histogram.add(took_s, 48)

    def to_data(self) -> dict[str, Any]:
        return {
            "submitted": 50 * self._seconds,
            "ok": 48 * self._seconds,
            "expired": 2 * self._seconds,
            "slo_ms": 400.0,
            "rate_rps": 60.0,
            "latency_s": msgspec.structs.asdict(self._latency_s.buckets()),
            "stage_s": {name: msgspec.structs.asdict(each.buckets()) for name, each in self._stage_s.items()},
            "lost_at": {"detect": 0, "recognise": 2 * self._seconds},
        }


class _Model:
    def __init__(self, index: int) -> None:
        self.slo_ms = 20.0 + 5.0 * (index % 9)
        self.rate_rps = 20 + 13 * index
        self._late = index % 11 == 3  # one in eleven does badly
        bounds = buckets_around(self.slo_ms)
        self._counts = dict.fromkeys(("submitted", "ok", "late", "expired", "batches", "batched"), 0)
        times = ("latency_s", "proxy_s", "batching_s", "gpulet_queue_s", "execution_s")
        self._histograms = {key: Histogram(bounds) for key in times}
        self._histograms["batch_sizes"] = Histogram(BATCH_SIZES)
        self._index = index
        self._sizes = (16, 64, 256) if index % 16 == 1 else ()

    def second(self, now: int) -> None:
        rate = int(self.rate_rps * (1.0 + 0.3 * ((now * (self._index + 3)) % 17 - 8) / 8.0))
        bad = rate // 8 if self._late else 0
        self._add(submitted=rate, ok=rate - bad, expired=bad // 2, late=bad - bad // 2, batches=rate // 4, batched=rate)
        slo_s = self.slo_ms / 1000.0
        self._histograms["latency_s"].add(0.45 * slo_s, rate // 2)
        self._histograms["latency_s"].add(0.8 * slo_s, rate - rate // 2 - bad)
        self._histograms["latency_s"].add(1.2 * slo_s, bad)
        for key, part in (("batching_s", 0.3), ("gpulet_queue_s", 0.02), ("execution_s", 0.2)):
            self._histograms[key].add(part * slo_s, rate)
        if self._index % 2:
            self._histograms["proxy_s"].add(0.01 * slo_s, rate)
        self._histograms["batch_sizes"].add(4.0, rate // 4)

    def _add(self, **more: int) -> None:
        for key, count in more.items():
            self._counts[key] += count

    def to_data(self) -> dict[str, Any]:
        return {
            **self._counts,
            "by_size": [
                {
                    "sizes": {"tokens": tokens},
                    "ok": self._counts["ok"] // len(self._sizes),
                    "late": self._counts["late"],
                    "input_elements": 3 * tokens * self._counts["ok"],
                    "computed_elements": 4 * tokens * self._counts["ok"],
                }
                for tokens in self._sizes
            ],
            "rejected": 0,
            "failed": 0,
            "cancelled": 1,
            "queued": self._index % 4,
            "slo_ms": self.slo_ms,
            "rate_rps": float(self.rate_rps),
            "planned_goodput_rps": float(self.rate_rps),
            "planned_latency_ms": 0.6 * self.slo_ms,
            "mean_batch": 4.0,
            "execution_p50_ms": 0.2 * self.slo_ms,
            **{key: msgspec.structs.asdict(histogram.buckets()) for key, histogram in self._histograms.items()},
        }
