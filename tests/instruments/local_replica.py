"""A gpu-let in the process of a test, without Ray and Serve."""

from __future__ import annotations

from typing import Any

from tenuto.deployments.gpulet.replica import GpuletReplica
from tenuto.deployments.serve.config import ServeApplication
from tenuto.deployments.serve.user_config import GpuletConfig
from tenuto.deployments.wire.peer import Endpoint

__all__ = ["LocalReplica"]


class LocalReplica(GpuletReplica):
    """The replica, but for what Serve calls and asks Ray for."""

    async def endpoint(self, node_id: str = "") -> Endpoint:
        """Return where it listens on this machine."""
        del node_id
        return self._near

    async def close(self) -> None:
        """Finish what runs, then release the device."""
        await super().__del__()

    def __del__(self) -> None:  # type: ignore[override]  # Serve's hook is a coroutine; here `close` is awaited
        pass

    @classmethod
    async def start(cls, application: ServeApplication[GpuletConfig], **changes: Any) -> LocalReplica:
        """Start as Serve would: construct, then configure; `changes`: of what it is told."""
        assert application.spec is not None
        replica = cls.__new__(cls)
        await replica.__init__(application.spec.model_dump(mode="json"))  # type: ignore[misc]
        try:
            await replica.reconfigure({**application.user_config.to_data(), **changes})
        except BaseException:
            await replica.close()
            raise
        return replica
