"""Asks Ray's autoscaler for GPUs by type, with the labels that nodes have. Without an autoscaler nothing comes.

Ray brings all that it is asked for, or nothing: a type that none of its nodes can have keeps all others away. So the
controller gives up a type that does not come (`gpu_requests`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tenuto.deployments.control.settings import GpuBounds
from tenuto.deployments.machines.joining_nodes import TYPE_LABEL, count_labelled
from tenuto.deployments.process.ray_nodes import staying_nodes
from tenuto.profiles.gpu_types import accelerators_of


def request_from_ray(bundles: Sequence[Mapping[str, float]], selectors: Sequence[Mapping[str, str]]) -> None:
    """Have Ray's autoscaler keep these bundles possible, each on a node with the labels that its selector names."""
    from ray.autoscaler.sdk import request_resources

    request_resources(bundles=list(bundles), bundle_label_selectors=list(selectors))


class GpuAutoscaler:
    """Asks for as many GPUs more or fewer of each type as the controller says."""

    def __init__(
        self,
        bounds: Mapping[str, GpuBounds],
        request: Callable[[Sequence[Mapping[str, float]], Sequence[Mapping[str, str]]], None] = request_from_ray,
        nodes: Callable[[], list[dict[str, Any]]] = staying_nodes,
    ) -> None:
        """Ask within bounds, by GPU type. `request` reaches the autoscaler; `nodes` returns the nodes that stay, as Ray
        describes them."""
        self._bounds, self._request, self._nodes = bounds, request, nodes

    def ask_for(self, more: Mapping[str, int]) -> None:
        """Ask for so many GPUs more of each type than there are, or fewer where negative.

        Ray is asked for totals, and counts nodes by their labels alone: GPUs on nodes without these labels are not
        among them, and those of a node that cannot be used are. A type is asked for by whole nodes, and never above its
        bound.
        """
        bundles: list[Mapping[str, float]] = []
        selectors: list[Mapping[str, str]] = []
        nodes = self._nodes()
        for kind, count in more.items():
            bounds = self._bounds[kind]
            total = min(bounds.max, max(0, count_labelled(nodes, kind, bounds.labels) + count))
            selector = bounds.labels or {TYPE_LABEL: f"in({','.join(accelerators_of(kind))})"}
            number = min(math.ceil(total / bounds.per_node), bounds.max // bounds.per_node)
            bundles += [{"GPU": bounds.per_node}] * number
            selectors += [selector] * number
        self._request(bundles, selectors)
