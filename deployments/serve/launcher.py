"""Brings a plan up on a Ray cluster and takes it down again, for `tenuto serve` and `tenuto quickstart`.

It uses the cluster that it is given, or one that was started here before. Otherwise it starts a local cluster, with
settings that must be in the environment before Ray starts.
"""

from __future__ import annotations

import contextlib
import errno
import io
import logging
import os
import random
import socket
from collections.abc import Callable
from typing import Any

from tenuto.deployments.process.limits import ANSWER_S, GENERATIONS_END_S, within
from tenuto.deployments.process.ray_address import (
    KnownDeployment,
    announce,
    begin_ray,
    end_ray,
    join_ray,
    make_session_folder,
    on_loopback,
)
from tenuto.deployments.process.ray_token import make_token
from tenuto.deployments.serve.applications import Applications, check_nodes
from tenuto.deployments.serve.config import ServeConfig
from tenuto.deployments.serve.discovery import retire_controller
from tenuto.deployments.serve.states import ApplicationState, serve_client
from tenuto.deployments.serve.user_config import Listen
from tenuto.errors import EnvironmentFaultError

# Ray reads these when its processes start. Niceness 0: with Ray's default of 15, any other program delays the gateway.
# Proxy check: by default Serve's start fails when its proxy is not up after 5 s, but a busy machine takes longer.
# Control loop: by default Serve's controller looks for changes ten times a second, which costs an idle server 3 to 5 %
# of a core. Serve's HAProxy mode stays off: clients use the gateways' own sockets, and HAProxy would show its
# statistics on every interface.
RAY_ENVIRONMENT = {
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.25",
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
    "RAY_worker_niceness": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_DEDUP_LOGS": "1",
}
_RETIRES_S = 5.0  # limit: for the controller's last look, before its Ray ends
_JOIN_S = 60.0  # limit: Ray itself gives a cluster's processes 30 s
_SERVE_STARTS_S = 180.0  # limit: Serve's proxy gets 60 s (above); on a busy machine its controller takes as long before
# limit: for the end of all processes at once (`UserConfig.ends_s`), and for the words about it
_SERVE_ENDS_S = GENERATIONS_END_S + 15.0


def start_local_ray(num_gpus: int) -> None:
    """Start a Ray for this process only, bound to the loopback interface. It ends with the process.

    Anybody who reaches Ray's ports can run code, so Ray's token stays on (`tenuto.deployments.process.ray_token`).

    Raises:
        EnvironmentFaultError: Ray did not start.
    """
    for key, value in RAY_ENVIRONMENT.items():
        os.environ.setdefault(key, value)
    make_token()
    own: dict[str, Any] = {"_node_ip_address": "127.0.0.1", "_temp_dir": str(make_session_folder())}
    try:
        with on_loopback():
            begin_ray(address="local", num_gpus=num_gpus, include_dashboard=False, **own)
    except ValueError as error:  # what Ray reads in the environment
        raise EnvironmentFaultError(
            f"a local Ray did not start: {error}\nCorrect or unset the variable RAY_… that says so."
        ) from error
    except Exception as error:  # Ray has no own kind of error for this
        raise EnvironmentFaultError(
            f"a local Ray did not start: {error}\nThis machine may be too busy: stop other programs and try again, or "
            "run `ray start --head` first and give its address."
        ) from error


class Launcher:
    """One connection to Ray and, below it, one set of Serve applications. Use as a context manager."""

    def __init__(self, *, progress: Callable[[str], None] = lambda _text: None) -> None:
        """`progress` is called with messages about what happens."""
        self._progress = progress
        self._joined_ray = False  # this launcher joined a Ray, and `close` leaves it
        self._has_begun = False  # applications of ours may run that `close` must remove
        self.owns_ray = False  # this launcher started a Ray, and `close` stops it
        self.base_url = ""  # the gateway's URL, such as http://127.0.0.1:8000
        self.operator_url = ""  # the URL for operators: with their own port, or else the gateway's

    def __enter__(self) -> Launcher:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def connect(self, *, num_gpus: int, address: str | None = None) -> None:
        """Join the running cluster, or start a local one with `num_gpus` logical GPUs.

        When this process is connected to a cluster already, that one is used, and stays connected after `close`.

        Args:
            num_gpus: logical GPUs of a Ray that is started here.
            address: a cluster's address, or `local` to start a new Ray even if another one runs. Default: RAY_ADDRESS,
                else the Ray that this user's last `tenuto serve` started, else a new local one.

        Raises:
            EnvironmentFaultError: an address was given and no cluster answers there.
        """
        import ray

        address = address or os.environ.get("RAY_ADDRESS")
        if ray.is_initialized():
            return
        if address != "local":
            try:
                within(_JOIN_S, join_ray, address or "auto")
                self._joined_ray = True
                return
            except ConnectionError as error:
                if address is not None:
                    raise EnvironmentFaultError(
                        f"no Ray cluster answers at {address}: {error}. Start one with `tenuto serve PLAN` or "
                        "`ray start --head`, or correct --address and RAY_ADDRESS."
                    ) from error
        self._progress("starting a local Ray")
        start_local_ray(num_gpus)
        announce(KnownDeployment(ray.get_runtime_context().gcs_address))
        self.owns_ray = True

    def start_serve(self, config: ServeConfig) -> None:
        """Start Serve for this config, unless Serve runs already.

        Raises:
            EnvironmentFaultError: Serve does not start, a port is taken, or the cluster lacks a node of the plan.
        """
        from ray import serve

        check_nodes(config)
        gateway, proxy = config.entry.user_config, Listen(port=config.proxy_port)
        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        ours = is_serving()
        for listen, option in config.sockets:
            if not ours:
                check_port(listen.host, listen.port, option)
        try:
            how = {key: value for key, value in config.to_data().items() if key != "applications"}
            within(_SERVE_STARTS_S, serve.start, **how)
        except Exception as error:  # Ray has several kinds of errors for a proxy that stopped
            why = ApplicationState("", str(error)).essence
            raise EnvironmentFaultError(f"Ray Serve did not start:\n{why}\nRun `tenuto doctor`.") from error
        # A Serve that already ran keeps its own address.
        actual = serve_client().http_config
        if (actual.host, actual.port) != (proxy.host, proxy.port):
            self._progress(f"Ray Serve already runs here, and its proxies listen on {actual.host}:{actual.port}")
        self.base_url = "" if gateway.listen is None else gateway.listen.url
        self.operator_url = self.base_url if gateway.operators is None else gateway.operators.url
        self._has_begun = True

    def leave(self) -> None:
        """Let the applications run on, and leave a Ray that was joined here."""
        self._has_begun = False
        if self._joined_ray:
            self._joined_ray = False
            end_ray(ANSWER_S)

    def close(self) -> None:
        """Drain and remove the applications. Leave Ray if it was joined here; stop it if it was started here."""
        import ray

        if not ray.is_initialized():
            return
        from ray import serve

        # Ray prints that Serve's controller was killed. Serve itself kills it, so the output is dropped.
        with (
            contextlib.suppress(Exception),
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
        ):
            if self.owns_ray:
                retire_controller(_RETIRES_S)
                # Limit: Serve gives up before we do; by itself it waits 30 s.
                within(_SERVE_ENDS_S, serve_client().shutdown, _SERVE_ENDS_S - 5.0)
                within(_SERVE_ENDS_S, serve.shutdown)
            elif self._has_begun:
                Applications().delete_ours()
        self._has_begun = False
        if self.owns_ray or self._joined_ray:
            with contextlib.suppress(EnvironmentFaultError):
                end_ray(_SERVE_ENDS_S)


def unused_port(*wished: int) -> int:
    """Return the first of the wished ports on which nobody listens, or else a free port from 20000 to 32767.

    Linux gives higher ports to outgoing connections, and Ray's workers use others. Such a port would often be taken
    before we listen on it, some seconds later.
    """
    for port in (*wished, *random.SystemRandom().sample(range(20000, 32768), 100)):
        with contextlib.suppress(OSError), socket.create_server(("", port)):
            return port
    raise EnvironmentFaultError("no port between 20000 and 32768 is free. Stop what listens there.")


def is_serving() -> bool:
    """Return whether Serve already runs on this cluster. (`serve.status` would start it with default options.)"""
    import ray

    actors = within(ANSWER_S, ray.util.list_named_actors, all_namespaces=True)
    return any(actor["name"] == "SERVE_CONTROLLER_ACTOR" for actor in actors)


def check_port(host: str, port: int, option: str) -> None:
    """Raise if nobody can listen there, as when another process does. Serve would fail later, and not say why."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            why = f"({error.strerror}). Choose another with"
            if error.errno == errno.EADDRINUSE:
                raise EnvironmentFaultError(f"{host}:{port} is taken {why} {option}.") from error
            if error.errno == errno.EADDRNOTAVAIL or isinstance(error, socket.gaierror):
                raise EnvironmentFaultError(f"{host} is no IPv4 address of this machine {why} --host.") from error
            raise EnvironmentFaultError(f"{host}:{port} cannot be listened on {why} {option}.") from error
