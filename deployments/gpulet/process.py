"""A gpu-let as a plain process, without Ray: what `tenuto.deployments.serve.local` starts.

Reads one line of JSON, `{"spec": …, "user_config": …}` as in a Serve config, from its standard input; writes its
endpoint, or `{"error": …}`, to its standard output; and runs until its input ends.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from tenuto.deployments.gpulet.replica import GpuletReplica
from tenuto.deployments.wire.peer import Endpoint
from tenuto.errors import TenutoError


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
    async def start(cls, spec: dict[str, Any], user_config: dict[str, Any]) -> LocalReplica:
        """Start as Serve would: construct, then configure."""
        replica = cls.__new__(cls)
        await replica.__init__(spec)  # type: ignore[misc]
        try:
            await replica.reconfigure(user_config)
        except BaseException:
            await replica.close()
            raise
        return replica


async def _main() -> None:
    loop = asyncio.get_running_loop()
    given = json.loads(await loop.run_in_executor(None, sys.stdin.readline))
    try:
        replica = await LocalReplica.start(given["spec"], given["user_config"])
    except TenutoError as error:
        print(json.dumps({"error": str(error)}), flush=True)
        return
    endpoint = await replica.endpoint()
    print(json.dumps({"address": endpoint.address, "token": endpoint.token}), flush=True)
    await loop.run_in_executor(None, sys.stdin.read)
    await replica.close()


if __name__ == "__main__":
    asyncio.run(_main())
