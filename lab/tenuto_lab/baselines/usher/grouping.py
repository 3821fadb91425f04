"""USHER's grouping: matching pairs models, in rounds, whose compute and memory needs balance each other.

The distance of a group is |sum Creq - sum Mreq| over the average requirements of its models (USHER, section 4.2). Each
round merges groups along a minimum-weight matching of maximum cardinality, so two rounds give groups of up to four.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import networkx as nx
import numpy as np

TIES = ("exact", "float")

# limit: blossom matching is cubic; above this many nodes a closed form finds a matching of the same weight.
LARGEST_GENERAL_MATCHING = 128
# format: weights are whole numbers of this many parts per percent, so that exact ties stay ties; the workload's order
# breaks them.
PARTS_PER_PCT = 10_000


# Paper: §3.3.
def group_models(
    averages: Mapping[str, tuple[float, float]], max_group_size: int = 4, *, ties: str = "exact"
) -> tuple[tuple[str, ...], ...]:
    """Return groups of at most `max_group_size` models, largest total requirement first.

    The paper leaves the order of groups open; largest first reproduces the thesis' section 5.4.1. Within a group,
    models keep the order of `averages`. Sizes double from round to round, so 2 and 4 are reached exactly.

    Args:
        averages: mean Creq and Mreq by model, in the workload's order; in percent, with `float` as fractions.
        max_group_size: 1, 2, 4, …
        ties: `exact`: sums equal in whole parts of a percent are equal, which gives the thesis' examples of section
            5.4. `float`: differences as floating point has them, which gives its groups of section 6.2.1 (from its
            printed memory requirements, metric `mem_cap_pct`). Nobody says how ties are broken; when all models are
            compute-heavy, every pairing weighs the same.
    """
    names = list(averages)
    position = {name: index for index, name in enumerate(names)}
    surplus: dict[str, float] = {name: averages[name][0] - averages[name][1] for name in names}
    if ties == "exact":
        surplus = {name: round(value * PARTS_PER_PCT) for name, value in surplus.items()}
    groups: list[list[str]] = [[name] for name in names]
    size = 1
    while 2 * size <= max_group_size and len(groups) > 1:
        sums = [sum(surplus[m] for m in group) for group in groups]
        general = len(groups) <= LARGEST_GENERAL_MATCHING
        pairs = general_matching(sums) if general else matching_on_a_line(sums)
        paired = {index for pair in pairs for index in pair}
        groups = [groups[i] + groups[j] for i, j in pairs] + [g for i, g in enumerate(groups) if i not in paired]
        size *= 2
    for group in groups:
        group.sort(key=position.__getitem__)
    groups.sort(key=lambda g: (-round(sum(sum(averages[m]) for m in g), 6), position[g[0]]))
    return tuple(tuple(group) for group in groups)


def general_matching(surplus: Sequence[float]) -> list[tuple[int, int]]:
    """Match by the blossom algorithm on the complete graph with weights |surplus_i + surplus_j|."""
    graph = nx.Graph()
    graph.add_nodes_from(range(len(surplus)))
    graph.add_weighted_edges_from(
        (i, j, abs(surplus[i] + surplus[j])) for i in range(len(surplus)) for j in range(i + 1, len(surplus))
    )
    return sorted((min(edge), max(edge)) for edge in nx.min_weight_matching(graph))


def matching_on_a_line(surplus: Sequence[float]) -> list[tuple[int, int]]:
    """Match the largest surplus with the smallest, the next with the next, and so on.

    For a convex cost of the sum (here its absolute value) this is a minimum-weight perfect matching: exchanging
    partners of two pairs only spreads the sums. With an odd count, the element whose absence makes the rest cheapest
    stays alone.
    """
    order = sorted(range(len(surplus)), key=lambda index: (surplus[index], index))
    if len(order) % 2:
        values = np.array([surplus[index] for index in order], dtype=np.float64)
        costs = [_folded_cost(np.delete(values, left_out)) for left_out in range(len(order))]
        del order[int(np.argmin(costs))]
    half = len(order) // 2
    pairs = zip(order[:half], reversed(order[half:]), strict=True)
    return sorted((min(i, j), max(i, j)) for i, j in pairs)


def _folded_cost(values: np.ndarray[tuple[int], np.dtype[np.float64]]) -> float:
    return float(np.abs(values + values[::-1]).sum())
