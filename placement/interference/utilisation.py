"""GPU utilisations of a batch that runs alone: the input of fitted interference models."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from tenuto.errors import MissingProfileError
from tenuto.placement.interference.interference_model import Resident
from tenuto.profiles import ModelProfile

_KEPT = 64  # limit: profiles whose tables are kept

_Table = dict[float, tuple[list[int], list[float]]]  # by share in percent: batch sizes, ascending, and values


class Utilisations:
    """Metrics of profiles as fractions, measured alone at a batch size and a share.

    Between measured batch sizes, and between measured shares, values follow the line through the nearest two (gpulet's
    repository does so for batch sizes). Tables are built once per profile and metric.
    """

    def __init__(self) -> None:
        self._tables: dict[tuple[int, str], tuple[ModelProfile, _Table]] = {}  # the profile is kept so its id stays its

    def of(self, resident: Resident, metric: str) -> float:
        """Return a metric in percent as a fraction.

        Raises:
            MissingProfileError: batch size or share outside the measured range, or the metric was not measured.
        """
        table = self._table(resident.profile, metric)
        if not table:
            raise MissingProfileError(f"no point has metric '{metric}'. Profile the model with it.")
        shares = sorted(table)
        below, above, weight = _bracket(shares, resident.share_pct, f"metric '{metric}', share")
        low = _at(table[below], resident.batch_size, metric)
        if above == below:
            return low / 100.0
        return (low + weight * (_at(table[above], resident.batch_size, metric) - low)) / 100.0

    def _table(self, profile: ModelProfile, metric: str) -> _Table:
        key = (id(profile), metric)
        if key not in self._tables:
            table: _Table = {}
            for point in sorted(profile.points, key=lambda point: point.batch_size):
                value = point.metrics.get(metric)
                if value is not None:
                    sizes, values = table.setdefault(point.share_pct, ([], []))
                    sizes.append(point.batch_size)
                    values.append(value)
            while len(self._tables) >= _KEPT:
                del self._tables[next(iter(self._tables))]
            self._tables[key] = (profile, table)
        return self._tables[key][1]


def _at(column: tuple[list[int], list[float]], batch_size: int, metric: str) -> float:
    sizes, values = column
    below, above, weight = _bracket(sizes, batch_size, f"metric '{metric}', batch size")
    low, high = values[sizes.index(int(below))], values[sizes.index(int(above))]
    return low + weight * (high - low)


def _bracket(known: Sequence[float], wanted: float, what: str) -> tuple[float, float, float]:
    """Return the nearest known values around the wanted one, and its position between them, 0 to 1."""
    index = bisect_left(known, wanted)
    if index < len(known) and known[index] == wanted:
        return wanted, wanted, 0.0
    if index in (0, len(known)):
        raise MissingProfileError(f"{what} {wanted:g} is outside the measured range ({known[0]:g} to {known[-1]:g}).")
    below, above = known[index - 1], known[index]
    return below, above, (wanted - below) / (above - below)
