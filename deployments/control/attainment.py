"""Finds models that lose more of their requests than they may, once chance no longer explains it."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from tenuto.deployments.control.interface import ModelSeen
from tenuto.deployments.control.rates import FALSE_ALARM


class Attainment:
    """Counts requests in time and not in time, by model, over the last `window_s`.

    Each look is judged by as many of the last looks as speak loudest. So the window limits how small a loss can be told
    from chance, not how soon a large one is seen.
    """

    def __init__(self, models: Sequence[str], *, target: float, window_s: float) -> None:
        self._target, self._window_s = target, window_s
        self._names = tuple(models)
        self._looks: deque[tuple[float, NDArray[np.float64]]] = deque()  # (time, [in time, not in time] by model)
        self._bad = 0.0  # requests not in time in these looks
        self._lost: dict[str, float] = {}  # lost part in the looks that spoke loudest

    def set_models(self, models: Sequence[str]) -> None:
        """Watch these models from zero."""
        self._names = tuple(models)
        self.forget()

    def forget(self) -> None:
        """Judge only requests that end from now on."""
        self._looks.clear()
        self._bad = 0.0
        self._lost = {}

    def observe(
        self, now_s: float, seen: Mapping[str, ModelSeen], dispersion: Mapping[str, float] | None = None
    ) -> list[str]:
        """Add the requests that ended since the last look; return the models that lose more than they may.

        The test compares the requests of the last looks, as many as speak loudest, with the share that may be lost
        (generalised likelihood ratio of a Bernoulli rate, divided by the `dispersion` of the model's arrivals, as
        requests that come together are lost together).
        """
        looked = [seen.get(name, ModelSeen()) for name in self._names]
        counts = np.array([[each.good, each.bad] for each in looked], dtype=np.float64).reshape(-1, 2)
        self._looks.append((now_s, counts))
        self._bad += counts[:, 1].sum()
        while self._looks[0][0] <= now_s - self._window_s:
            self._bad -= self._looks.popleft()[1][:, 1].sum()
        self._lost = {}
        if not self._bad:
            return []
        total = np.cumsum([counts for _, counts in reversed(self._looks)], axis=0)
        lost, ended = total[:, :, 1], np.maximum(1.0, total.sum(axis=2))
        part, allowed = lost / ended, 1.0 - self._target
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = np.where(part > 0, lost * np.log(part / allowed), 0.0)
            ratio += np.where(part < 1, (ended - lost) * np.log((1.0 - part) / self._target), 0.0)
        ratio[part <= allowed] = 0.0
        loudest = ratio.argmax(axis=0)
        each = np.arange(len(self._names))
        self._lost = dict(zip(self._names, part[loudest, each].tolist(), strict=True))
        spread = np.array([max(1.0, (dispersion or {}).get(name, 1.0)) for name in self._names])
        is_bad = ratio[loudest, each] / spread > FALSE_ALARM
        return [name for name, is_worse in zip(self._names, is_bad, strict=True) if is_worse]

    def lost_part(self, models: Collection[str]) -> dict[str, float]:
        """Return the part of each model's requests that was lost lately."""
        return {name: self._lost.get(name, 0.0) for name in models}
