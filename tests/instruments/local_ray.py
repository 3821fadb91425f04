"""One Ray for all tests of a run that need a cluster: starting Ray and Serve takes as long as most such tests."""

import os
import shutil
import tempfile
import warnings
from pathlib import Path

__all__ = ["LocalRay"]


class LocalRay:
    """The one Ray of a test run with its Serve, on a port and in a folder of this run alone."""

    def __init__(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="r")  # short enough for sockets
        os.environ["RAY_TMPDIR"] = self._folder
        # What emulated gpu-lets take more than planned, by program.
        self.slower = Path(self._folder, "slower.json")
        self.slower.write_text("{}")
        os.environ["TENUTO_EMULATED_SLOWER"] = str(self.slower)

    def connect(self) -> None:
        """Be connected to it; it is started where it does not run."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what Ray Serve imports
            import ray
            from ray import serve

        from tenuto.deployments.serve.launcher import start_local_ray, unused_port

        if not ray.is_initialized():
            start_local_ray(num_gpus=8)
            # The port that a config names does not count any more: Tenuto uses the Serve that runs.
            options = {"host": "127.0.0.1", "port": unused_port(), "request_timeout_s": None}
            serve.start(proxy_location="HeadOnly", http_options=options, logging_config={"enable_access_log": False})

    def end(self) -> None:
        """Stop it, for tests that start a Ray of their own."""
        import ray
        from ray import serve

        if ray.is_initialized():
            serve.shutdown()
            ray.shutdown()

    def forget(self) -> None:
        """Stop it for good."""
        self.end()
        shutil.rmtree(self._folder, ignore_errors=True)
