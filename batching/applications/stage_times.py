"""How long requests to models take at least, and what the requests of all applications under way still need.

The runs feed it themselves. A driver only says which system serves the models: at its start, and with every new plan.
"""

from __future__ import annotations

from collections.abc import Mapping

from tenuto.batching.core.system import INF, System


class StageTimes:
    """What runs of applications know of the models that they ask; one object for all runs of a process.

    `least_ms` is by model: what a request takes from when it is sent to its answer if it runs at once, alone, on the
    fastest gpu-let. A model without an entry takes no time at least.
    """

    def __init__(self, least_ms: Mapping[str, float] | None = None) -> None:
        self._least_ms = dict(least_ms or {})

    def follow(self, system: System) -> None:
        """Take the planned latencies of this system's models from now on."""
        network = system.network
        fixed_ms = network.ctrl_ms + network.data_ms_per_request + network.response_ms
        self._least_ms = {}
        for hosts in system.distinct_hosts():
            for program, host in hosts.items():
                for model in system.programs[program].members:
                    name, alone_ms = system.models[model].name, host.planned_batch_ms(1) + fixed_ms
                    self._least_ms[name] = min(alone_ms, self._least_ms.get(name, INF))

    def least_ms(self, model: str) -> float:
        """Return what a request to a model takes at least."""
        return self._least_ms.get(model, 0.0)
