"""Stacked regression: lasso, kernel ridge and gradient boosting, mixed by their errors on models that they did not see.

The three regressors learn the errors of a physical baseline. Mixing weights are non-negative, and fitted on
out-of-fold predictions with whole models held out. When the mixture does not help unseen models, the baseline alone is
used.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@contextmanager
def checked_once(*arrays: Floats) -> Iterator[None]:
    """Check the training data once. scikit-learn would check it for each tree, which takes half of the time.

    Raises:
        ValueError: something is not finite.
    """
    from sklearn import config_context
    from sklearn.utils import assert_all_finite

    for array in arrays:
        assert_all_finite(array)
    with config_context(assume_finite=True, skip_parameter_validation=True):
        yield


def _learners() -> list[Any]:
    from sklearn.ensemble import GradientBoostingRegressor
    from sklearn.kernel_ridge import KernelRidge
    from sklearn.linear_model import Lasso
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    return [
        make_pipeline(StandardScaler(), Lasso(alpha=0.02, max_iter=20_000)),
        make_pipeline(StandardScaler(), KernelRidge(kernel="rbf", alpha=0.3, gamma=0.03)),
        GradientBoostingRegressor(n_estimators=60, max_depth=2, learning_rate=0.1, subsample=0.7, random_state=0),
    ]


def _is_better(residuals: Floats, predicted: Floats, groups: Sequence[str]) -> bool:
    """Whether models gain on average by more than two standard errors of the gain."""
    owners = np.array(groups)
    gains = np.array(
        [
            np.mean(np.abs(residuals[owners == name])) - np.mean(np.abs((residuals - predicted)[owners == name]))
            for name in sorted(set(groups))
        ]
    )
    return bool(gains.mean() > 2 * gains.std(ddof=1) / np.sqrt(len(gains)))


class StackedRegression:
    """Predicts a residual from features. With fewer than three models to learn from it predicts zero."""

    FOLDS = 4

    def __init__(self) -> None:
        self.weights: Floats = np.zeros(3)
        self._fitted: list[Any] = []

    def fit(self, rows: Floats, residuals: Floats, groups: Sequence[str]) -> StackedRegression:
        """Learn from feature rows and residuals; `groups` names the model of each row."""
        from scipy.optimize import nnls

        names = sorted(set(groups))
        if len(names) < 3:
            return self
        held = np.zeros((len(residuals), 3))
        owners = np.array([names.index(group) % self.FOLDS for group in groups])
        with checked_once(rows, residuals):
            for fold in sorted(set(owners.tolist())):
                inside, outside = owners != fold, owners == fold
                for column, learner in enumerate(_learners()):
                    held[outside, column] = learner.fit(rows[inside], residuals[inside]).predict(rows[outside])
        found, _ = nnls(held, residuals)
        mixture = found / max(1.0, float(found.sum()))  # a mixture, never an amplification
        if not _is_better(residuals, held @ mixture, groups):
            return self
        self.weights = mixture
        pairs = zip(mixture, _learners(), strict=True)
        self._fitted = [learner.fit(rows, residuals) if weight > 0 else None for weight, learner in pairs]
        return self

    def predict(self, rows: Floats) -> Floats:
        """Return the residual of each row."""
        result = np.zeros(len(rows))
        for weight, learner in zip(self.weights, self._fitted, strict=False):
            if weight > 0:
                result += weight * learner.predict(rows)
        return result
