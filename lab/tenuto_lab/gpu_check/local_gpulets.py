"""The gpu-lets of a plan as plain processes of this machine, without Ray.

Each is this module as a program: it reads one line of JSON, `{"spec": …, "user_config": …}` as in a Serve config, from
its standard input; writes its endpoint, or `{"error": …}`, to its standard output; and runs until its input ends.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys

from tenuto.deployments.gpulet.replica import LocalReplica
from tenuto.deployments.serve.config import ServeApplication, ServeConfig
from tenuto.deployments.serve.user_config import GpuletConfig, GpuletSpec
from tenuto.deployments.wire.peer import Endpoint, Finder
from tenuto.errors import EnvironmentFaultError, TenutoError

_START_S = 300.0


class LocalGpulets:
    """Starts what a Serve config (`tenuto.deployments.serve.config`) says, and ends it. An async context manager."""

    def __init__(self, config: ServeConfig) -> None:
        """Take the config of emulated, CPU or GPU gpu-lets."""
        self._applications = config.gpulets
        self._processes: dict[str, asyncio.subprocess.Process] = {}
        self._endpoints: dict[str, Endpoint] = {}

    async def __aenter__(self) -> LocalGpulets:
        try:
            await asyncio.gather(*(self._start(app) for app in self._applications))
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.close()

    async def _start(self, application: ServeApplication[GpuletConfig]) -> None:
        """Start one gpu-let and wait until its models are loaded.

        Raises:
            EnvironmentFaultError: it did not start, with its reason.
        """
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",
            "-m",
            "tenuto_lab.gpu_check.local_gpulets",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, **dict(application.actor.environment)},
        )
        spec = application.spec
        assert spec is not None
        self._processes[spec.gpulet] = process
        assert process.stdin is not None
        assert process.stdout is not None
        given = {"spec": spec.model_dump(mode="json"), "user_config": application.user_config.to_data()}
        process.stdin.write(json.dumps(given).encode() + b"\n")
        async with asyncio.timeout(_START_S):
            line = await process.stdout.readline()
        said = json.loads(line or b'{"error": "its process ended"}')
        if "error" in said:
            raise EnvironmentFaultError(f"gpu-let {spec.gpulet} did not start: {said['error']}")
        address = said["address"]
        self._endpoints[spec.gpulet] = Endpoint(
            address if isinstance(address, str) else (address[0], address[1]), said["token"]
        )

    def find(self, gpulet_id: str) -> Finder:
        """Return what finds a gpu-let; for a `Dispatcher`."""

        async def found() -> Endpoint:
            return self._endpoints[gpulet_id]

        return found

    @property
    def pids(self) -> dict[str, int]:
        """The process of every gpu-let."""
        return {name: process.pid for name, process in self._processes.items()}

    async def close(self) -> None:
        """End all processes; those that do not end are killed."""
        for process in self._processes.values():
            if process.stdin is not None:
                process.stdin.close()
        for process in self._processes.values():
            try:
                async with asyncio.timeout(10.0):
                    await process.wait()
            except TimeoutError:
                process.kill()
                await process.wait()


async def _main() -> None:
    loop = asyncio.get_running_loop()
    given = json.loads(await loop.run_in_executor(None, sys.stdin.readline))
    try:
        spec, config = GpuletSpec.model_validate(given["spec"]), GpuletConfig.model_validate(given["user_config"])
        replica = await LocalReplica.start(spec, config)
    except TenutoError as error:
        print(json.dumps({"error": str(error)}), flush=True)
        return
    endpoint = await replica.endpoint()
    print(json.dumps({"address": endpoint.address, "token": endpoint.token}), flush=True)
    await loop.run_in_executor(None, sys.stdin.read)
    await replica.close()


if __name__ == "__main__":
    asyncio.run(_main())
