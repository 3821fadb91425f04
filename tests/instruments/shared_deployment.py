"""The deployment on this run's Ray that live tests share: six models, two gateways and two sub-clusters.

Bringing a deployment up takes longer than asking it. Tests that only ask come first; those that change the deployment
go on from what the one before left.
"""

from __future__ import annotations

from typing import Any

from tenuto.deployments.serve.deployment import Deployment
from tenuto.deployments.serve.launcher import Launcher, unused_port
from tenuto.placement import Plan
from tests.deployments.entry.test_generation import BLOCKS, LENGTHS, OPTIONS, SLO, SLOW
from tests.instruments.live import bring_up

__all__ = ["SharedDeployment"]

PORT = unused_port()
_GENERATES = {"rate_rps": 10, "slo": SLO, "generates": LENGTHS}
_ON_CPU = {"alpha_ms": 40.0, "beta_ms": 40.0}
_MODELS: dict[str, dict[str, Any]] = {
    "synthetic": {"rate_rps": 40, "slo_ms": 200, "latency": {"alpha_ms": 1.0, "beta_ms": 9.0}},
    "right": {"rate_rps": 40, "slo_ms": 150, "latency": {"alpha_ms": 1.0, "beta_ms": 9.0}},
    "mobilenet_v2": {"rate_rps": 2, "slo_ms": 5000, "latency": _ON_CPU},
    "own": {"source": "tests.instruments.own_models:scale", "rate_rps": 20, "slo_ms": 60_000},
    "real": {"source": "transformers/llama", "options": OPTIONS, **_GENERATES},
    "slow": {"options": {"tokenizer": "bytes"}, **_GENERATES},
}
_OF_SECOND_SUB_CLUSTER = ("right", "slow")


def _plan(*, batch_size: int, share_pct: float, has_mobilenet: bool, hooks: str, slow_on: tuple[str, ...]) -> Plan:
    """Return two emulated gpu-lets of `synthetic`, one of them with a share, and one or more of each other model; those
    of `slow` take a part of two GPUs together."""
    text = {"batch_size": 8, "kv_tokens": BLOCKS * 16}
    writes = {"gpu": "v", "also_on": ["w"], "share_pct": 30}
    replicas: list[tuple[dict[str, Any], str, dict[str, Any]]] = [
        ({"id": "n0/0/a", "gpu": "n0/0", "share_pct": share_pct}, "synthetic", {"batch_size": batch_size}),
        ({"id": "n0/1/a", "gpu": "n0/1"}, "synthetic", {"batch_size": 4}),
        ({"id": "n0/3/a", "gpu": "n0/3"}, "right", {"batch_size": 4}),
        ({"id": "n0/4/a", "gpu": "n0/4"}, "own", {"batch_size": 4, "latency": {"alpha_ms": 1.0, "beta_ms": 5.0}}),
        ({"id": "a", "gpu": "c"}, "real", text),
        *(({"id": each, **writes}, "slow", text | {"steps": SLOW.model_dump(mode="json")}) for each in slow_on),
    ]
    if has_mobilenet:
        place = {"id": "n0/2/a", "gpu": "n0/2", "share_pct": 50.0}
        replicas.append((place, "mobilenet_v2", {"batch_size": 2, "latency_ms": 120.0}))
    types = dict.fromkeys(("n0/0", "n0/1", "n0/3", "v", "w"), "v100") | dict.fromkeys(("n0/2", "n0/4", "c"), "cpu")
    own = {"options": {"factor": 3.0, "hooks": f"tests.instruments.own_hooks:{hooks}"}}
    return Plan.from_data(
        {
            "policy": {"name": "test"},
            "gpus": [{"id": name, "type": kind} for name, kind in types.items()],
            "gpulets": [
                {**place, "models": [{"name": name, **_latency(name), **replica}]} for place, name, replica in replicas
            ],
            "models": [{"name": name, **spec, **(own if name == "own" else {})} for name, spec in _MODELS.items()],
            "unserved": [] if has_mobilenet else ["mobilenet_v2"],
            "overcommits": True,
        }
    )


def _latency(name: str) -> dict[str, Any]:
    return {"latency": _MODELS[name]["latency"]} if "latency" in _MODELS[name] else {}


class SharedDeployment:
    """What runs, and how a test changes it."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self._options: dict[str, Any] = {
            "batch_size": 4,
            "share_pct": 50.0,
            "has_mobilenet": True,
            "hooks": "Numbers",
            "slow_on": ("b",),
        }
        self.apply()

    @property
    def url(self) -> str:
        """Where its gateways listen."""
        return self._launcher.base_url

    @property
    def operator_url(self) -> str:
        """Where they answer operators."""
        return self._launcher.operator_url

    @property
    def plan(self) -> Plan:
        """What it serves."""
        return _plan(**self._options)

    def apply(self, **changes: Any) -> None:
        """Change options of its plan, and wait until the plan is what runs."""
        self._options |= changes
        bring_up(
            self._launcher,
            Deployment(
                plan=self.plan,
                port=PORT,
                scheduler="eager",
                gateways=2,
                log_json=True,
                partition={name: int(name in _OF_SECOND_SUB_CLUSTER) for name in _MODELS},
                gateway_options={"max_body_mib": 4},
            ).config(),
        )
