"""Graph edit distance between operator graphs and the clusters it gives (USHER §3.4). No torch.

To find the exact distance is NP-hard, and hopeless for hundreds of operators. The distance here is the cost of a real
edit path, so it is an upper bound. Of two paths the cheaper is taken: one aligns both graphs in their order of
execution, the other assigns operators by kind and neighbourhood (K. Riesen, H. Bunke: Approximate graph edit distance
computation by means of bipartite graph matching, Image and Vision Computing 27(7), 2009). Networks traced from the same
code give exactly 0. Every inserted, deleted or relabelled operator and every inserted or deleted edge costs 1.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import combinations

import networkx
import numpy as np
from scipy.optimize import linear_sum_assignment

_LARGEST_ASSIGNMENT = 1500  # limit: operators; with more, the assignment would take too long


@dataclass(frozen=True)
class OperatorGraph:
    """Operators in their order of execution: kinds, and edges (producer, consumer) by index."""

    kinds: tuple[str, ...]
    edges: frozenset[tuple[int, int]]


def edit_distance(a: OperatorGraph, b: OperatorGraph) -> float:
    """Return the cost of the cheapest edit path found between two graphs; 0 exactly for graphs found to be equal."""
    best = _cost(a, b, _aligned(a, b))
    if best > 0 and max(len(a.kinds), len(b.kinds)) <= _LARGEST_ASSIGNMENT:
        best = min(best, _cost(a, b, _assigned(a, b)))
    return best


def cluster_graphs(
    graphs: Mapping[str, OperatorGraph], radius: float
) -> tuple[list[tuple[str, ...]], dict[tuple[str, str], float]]:
    """Return DBSCAN's clusters of two or more models, in the order given, and the distance of every pair.

    Two models are enough for a cluster; then DBSCAN's clusters are the connected parts of the graph of close models.

    Args:
        graphs: the graph of every model.
        radius: the radius of DBSCAN, in edits.
    """
    distances = {(a, b): edit_distance(graphs[a], graphs[b]) for a, b in combinations(graphs, 2)}
    close = networkx.Graph(pair for pair, distance in distances.items() if distance <= radius)
    parts = [tuple(name for name in graphs if name in part) for part in networkx.connected_components(close)]
    return sorted(parts, key=lambda part: list(graphs).index(part[0])), distances


def _aligned(a: OperatorGraph, b: OperatorGraph) -> dict[int, int]:
    matcher = SequenceMatcher(None, a.kinds, b.kinds, autojunk=False)
    return {block.a + k: block.b + k for block in matcher.get_matching_blocks() for k in range(block.size)}


def _assigned(a: OperatorGraph, b: OperatorGraph) -> dict[int, int]:
    """Assign operators by kind, kinds of neighbours, and place in the order. The place only breaks ties."""
    n, m = len(a.kinds), len(b.kinds)
    around_a, around_b = _adjacent_operators(a), _adjacent_operators(b)
    cost = np.zeros((n + m, n + m))
    cost[:n, m:] = np.where(np.eye(n, dtype=bool), 0.0, np.inf)
    cost[n:, :m] = np.where(np.eye(m, dtype=bool), 0.0, np.inf)
    for i in range(n):
        cost[i, m + i] = 1 + sum(around_a[i].values()) / 2
        for j in range(m):
            differing = sum(((around_a[i] - around_b[j]) | (around_b[j] - around_a[i])).values())
            place = 1e-4 * abs(i / n - j / m)  # derived: small beside an edit, so that it decides between equals
            cost[i, j] = (a.kinds[i] != b.kinds[j]) + differing / 2 + place
    for j in range(m):
        cost[n + j, j] = 1 + sum(around_b[j].values()) / 2
    rows, columns = linear_sum_assignment(cost)
    return {int(i): int(j) for i, j in zip(rows, columns, strict=True) if i < n and j < m}


def _adjacent_operators(graph: OperatorGraph) -> list[Counter[tuple[str, str]]]:
    around: list[Counter[tuple[str, str]]] = [Counter() for _ in graph.kinds]
    for producer, consumer in graph.edges:
        around[producer]["to", graph.kinds[consumer]] += 1
        around[consumer]["from", graph.kinds[producer]] += 1
    return around


def _cost(a: OperatorGraph, b: OperatorGraph, mapping: Mapping[int, int]) -> float:
    relabelled = sum(a.kinds[i] != b.kinds[j] for i, j in mapping.items())
    operators = len(a.kinds) + len(b.kinds) - 2 * len(mapping)
    common = sum((mapping.get(i), mapping.get(j)) in b.edges for i, j in a.edges)
    return float(relabelled + operators + len(a.edges) + len(b.edges) - 2 * common)
