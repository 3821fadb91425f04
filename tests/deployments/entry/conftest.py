"""Settings of all tests at the way in."""

import pytest

from tenuto.deployments.wire.liveness import Silence


@pytest.fixture(autouse=True)
def nobody_is_given_up_for_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gateways, dispatchers and gpu-lets are threads of one process here: on a busy machine an import, or a compiler,
    keeps all of them from being heard for longer than processes may be silent."""
    monkeypatch.setattr(Silence, "count_tick", lambda _self, *, heard: False)
