"""A gpu-let on a GPU that is shared through CUDA MPS. It joins before CUDA starts, is proved after the warm-up, and is
watched from then on.

No Ray actor owns the daemon. Each gpu-let holds a kernel lock on its GPU's folder; the first one starts the daemon, and
a reaper outside Ray stops it. If an actor per node owned it, the death of that actor would lose the list of gpu-lets,
and `serve deploy` alone would have no process that starts the actor.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, MutableMapping
from dataclasses import dataclass, field

from tenuto.deployments.serve.user_config import GpuletSpec
from tenuto.deployments.wire.status import MpsStatus
from tenuto.errors import EnvironmentFaultError
from tenuto.mps.control import ControlError
from tenuto.mps.daemon import PrivateDaemon
from tenuto.mps.faults import FATAL_XIDS, XidEvents
from tenuto.mps.inventory import GpuDevice, load_nvml, read_inventory
from tenuto.mps.others import OtherProcess, read_others
from tenuto.mps.share import Attachment, Report, client_environment, most_clients, verify_attachment
from tenuto.mps.sm_count import VisibleDevice, free_memory_mib, visible_devices

logger = logging.getLogger("ray.serve")

_VOLTA = (7, 0)  # format: compute capability from which CUDA MPS limits shares
_UNANSWERED = 3  # limit: unanswered health checks in a row: on a busy node the daemon may be late once
_OTHERS_LEAVE_S = 20  # limit: a gpu-let of the last plan that ran without CUDA MPS takes half of this time to end


def _xid_events(uuid: str) -> XidEvents | None:
    """Return the GPU's Xid events; None when the driver does not report them to this process."""
    try:
        return XidEvents(uuid, load_nvml())
    except EnvironmentFaultError as error:
        logger.warning("%s", error)
        return None


@dataclass(frozen=True)
class GpuEdges:
    """What a gpu-let's process asks of the driver, of CUDA and of its own machine; tests replace it."""

    devices: Callable[[], tuple[GpuDevice, ...]] = read_inventory
    visible: Callable[[], tuple[VisibleDevice, ...]] = visible_devices
    others: Callable[[PrivateDaemon], tuple[OtherProcess, ...] | None] = read_others
    free_mib: Callable[[], float | None] = free_memory_mib
    watch_xids: Callable[[str], XidEvents | None] = _xid_events
    environment: Mapping[str, str] = field(default_factory=lambda: os.environ)
    pid: int = field(default_factory=os.getpid)
    sleep: Callable[[float], None] = time.sleep


class SharedGpu:
    """One gpu-let's part in its GPU: `join` → CUDA starts, models load → `prove` → `check` now and then → `leave`.

    Invariant: between `join` and `prove`, and in a `turn`, no other gpu-let of this GPU starts. Every method blocks.
    """

    def __init__(self, spec: GpuletSpec, *, daemon: PrivateDaemon | None = None, edges: GpuEdges | None = None) -> None:
        """`spec` is what the plan asks for.

        Raises:
            ControlError: the daemon's folder has too long a path.
        """
        self._spec, self._uuid = spec, str(spec.gpu.uuid)
        self._daemon = daemon if daemon is not None else PrivateDaemon(self._uuid)
        self._edges = edges if edges is not None else GpuEdges()
        self._gpu: GpuDevice | None = None
        self._xids: XidEvents | None = None
        self._others: tuple[OtherProcess, ...] | None = None
        self._clients_before: frozenset[int] = frozenset()
        self._attachment: Attachment | None = None
        self._is_lost = threading.Event()
        self._admission = contextlib.ExitStack()
        self._sm_count: int | None = None
        self._unanswered = 0

    def join(self) -> None:
        """Check the GPU and this process's environment, start the daemon if need be, and wait for this gpu-let's turn.

        Raises:
            EnvironmentFaultError: the GPU is not here or cannot be shared, the environment is not what the plan asks
                for, the daemon cannot be started, the GPU faulted too often, or other processes use the GPU although
                the plan requires CUDA MPS.
        """
        self._check_environment()
        self._gpu = self._checked_gpu()
        limit = most_clients(self._gpu.driver)
        self._xids = self._edges.watch_xids(self._uuid)
        self._daemon.join()
        try:
            self._admission.enter_context(self._daemon.admitted())
            self._check_others()
            self._clients_before = frozenset(self._daemon.clients())
            if len(self._clients_before) >= limit:
                raise self._refused(
                    f"the GPU has {len(self._clients_before)} clients, and its driver allows {limit}. "
                    "Plan fewer gpu-lets on it"
                )
        except BaseException:
            self.leave()
            raise

    def turn(self) -> contextlib.AbstractContextManager[None]:
        """Hold the GPU's admission while a running gpu-let loads more models.

        Raises:
            EnvironmentFaultError: the start of another gpu-let takes too long, or this process has to leave.
        """
        return self._daemon.turn(self._is_lost.is_set)

    def _check_others(self) -> None:
        """Look for other processes on the GPU. When CUDA MPS is required there must be none; else the status shows
        them."""
        for _ in range(_OTHERS_LEAVE_S):
            self._others = self._edges.others(self._daemon)
            known = [other for other in self._others or () if other.name is not None]
            if self._spec.mps != "required" or not known:
                break
            self._edges.sleep(1.0)
        else:
            raise self._refused(
                f"{', '.join(map(str, known))} also use this GPU outside CUDA MPS and take time from its gpu-lets. "
                "Stop them, keep them out (nvidia-smi -c EXCLUSIVE_PROCESS), or plan with `mps: auto`"
            )
        if self._others:
            logger.warning(
                "gpu-let %s: also on %s: %s", self._spec.gpulet, self._uuid, ", ".join(map(str, self._others))
            )

    def _check_environment(self) -> None:
        """Compare this process's environment with the plan, before CUDA starts and reads it."""
        planned, environment = self._environment(), self._edges.environment
        wrong = [
            f"{key} is {environment.get(key, 'not set')} instead of {value}"
            for key, value in planned.items()
            if environment.get(key) != value
        ]
        if "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE" in environment.keys() - planned.keys():
            wrong.append("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE is set and should not be")
        if wrong:
            raise self._refused(
                f"{'; '.join(wrong)}. The node's environment (TENUTO_MPS_ROOT) must be that of who wrote the plan"
            )

    def _environment(self) -> dict[str, str]:
        """Return the variables that the plan asks for."""
        return client_environment(self._uuid, self._spec.share_pct, self._spec.memory_mib)

    def _checked_gpu(self) -> GpuDevice:
        by_uuid = {device.uuid: device for device in self._edges.devices()}
        device = by_uuid.get(self._uuid)
        if device is None:
            raise self._refused(
                f"this node has no {self._uuid}, only {', '.join(by_uuid) or 'none'}. Run `tenuto cluster`"
            )
        if device.is_mig:
            raise self._refused(
                f"{self._uuid} is in MIG mode without a MIG device. Run nvidia-smi -i {self._uuid} -mig 0"
            )
        if device.compute_capability < _VOLTA:
            raise self._refused(f"a {device.name} is older than Volta and cannot hold shares. Plan whole GPUs")
        return device

    def prove(self) -> None:
        """Prove after the warm-up that this process got what was planned, and let the next gpu-let start.

        Raises:
            EnvironmentFaultError: one of the proofs failed; the message names each that did.
        """
        with self._admission:
            seen = self._edges.visible()
            if len(seen) != 1:
                raise self._refused(f"CUDA shows it {len(seen)} GPUs instead of its own")
            report = Report(self._edges.pid, seen[0].uuid, seen[0].sm_count, self._edges.free_mib())
            attachment = verify_attachment(
                report,
                self._daemon,
                self._spec.share_pct,
                self._gpu_sm_count,
                clients_before=self._clients_before,
                memory_mib=self._spec.memory_mib,
            )
            if attachment.reasons:
                raise self._refused("; ".join(attachment.reasons))
            self._sm_count, self._attachment = report.sm_count, attachment
        logger.info(
            "gpu-let %s: has %s of %s SMs of %s (proof: %s)",
            self._spec.gpulet,
            self._sm_count,
            self._gpu_sm_count,
            self._uuid,
            attachment.proof,
        )

    def check(self) -> None:
        """Raise `EnvironmentFaultError` once this process has lost its GPU, by a fault or because the daemon is gone.

        The daemon may fail to answer twice in a row.
        """
        fatal = FATAL_XIDS.intersection(() if self._xids is None else self._xids.look())
        if fatal:
            self._is_lost.set()
            raise self._refused(
                f"the driver reports Xid {', '.join(map(str, sorted(fatal)))}: the GPU itself is unwell. Take it out "
                "of the cluster and look at nvidia-smi -q and dmesg"
            )
        try:
            status, clients = self._daemon.look()
        except ControlError as error:
            self._unanswered += 1
            if self._unanswered >= _UNANSWERED or not self._daemon.is_ours():
                self._is_lost.set()
                raise self._refused(f"its CUDA MPS daemon is lost: {error}") from error
            return
        self._unanswered = 0
        if status == "FAULT":
            self._is_lost.set()
            with contextlib.suppress(ControlError):  # busy for ten seconds: then another gpu-let notes the fault
                self._daemon.note_fault()
            raise self._refused("a fault of one gpu-let hit all of this GPU; each has to start again")
        if self._attachment is not None and self._client not in clients:
            self._is_lost.set()
            raise self._refused(f"its process {self._client} is no client of the CUDA MPS daemon any more")

    @property
    def _gpu_sm_count(self) -> int | None:
        return None if self._gpu is None else self._gpu.sm_count

    @property
    def _client(self) -> int:
        """The daemon's number for this process."""
        proved = self._attachment
        return self._edges.pid if proved is None or proved.client is None else proved.client

    def status(self) -> MpsStatus:
        """Return what CUDA MPS gave this gpu-let."""
        return MpsStatus(
            uuid=self._uuid,
            sm_count=self._sm_count,
            gpu_sm_count=self._gpu_sm_count,
            memory_limit=self._environment().get("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"),
            proof=None if self._attachment is None else self._attachment.proof,
            others=None if self._others is None else list(self._others),
            xids=None if self._xids is None else list(self._xids.seen),
        )

    def terminate(self) -> None:
        """End this process's work on the GPU before the process is killed. To kill it at work would be undefined
        behaviour for its neighbours. When the daemon refuses, that is logged, as nothing else can be done."""
        try:
            self._daemon.terminate(self._client)
        except ControlError as error:
            logger.error("gpu-let %s: its work on the GPU could not be ended: %s", self._spec.gpulet, error)

    def leave(self) -> None:
        """Leave the GPU; the daemon ends after the last process left. Safe at any time and more than once."""
        self._is_lost.set()
        self._admission.close()
        self._daemon.leave()

    def _refused(self, reason: str) -> EnvironmentFaultError:
        share = "the whole GPU" if self._spec.share_pct is None else f"{self._spec.share_pct:g} %"
        return EnvironmentFaultError(f"gpu-let {self._spec.gpulet} ({share} of {self._uuid}, CUDA MPS): {reason}.")


@contextlib.asynccontextmanager
async def turn_of(shared: SharedGpu | None) -> AsyncIterator[None]:
    """Hold the admission of a shared GPU, if there is one. The wait for it does not block the event loop.

    Raises:
        EnvironmentFaultError: see `SharedGpu.turn`.
    """
    if shared is None:
        yield
        return
    held = shared.turn()
    await asyncio.get_running_loop().run_in_executor(None, held.__enter__)
    try:
        yield
    finally:
        held.__exit__(None, None, None)


def bound(
    spec: GpuletSpec,
    *,
    has_driver: bool,
    devices: Callable[[], tuple[GpuDevice, ...]] = read_inventory,
    environment: MutableMapping[str, str] = os.environ,
) -> GpuletSpec:
    """Return what a gpu-let is to be, with the UUID of the MIG instance at its place. This process's environment then
    chooses it, which CUDA reads when it starts: call this before.

    Raises:
        EnvironmentFaultError: there is no such instance.
    """
    place = spec.gpu.instance
    if spec.gpu.uuid is not None or place is None or place.gpu_uuid is None:
        return spec
    if not has_driver or spec.executor == "emulated":
        return spec
    parts = [device for device in devices() if device.parent_uuid == place.gpu_uuid]
    uuids = [part.uuid for part in parts if part.start == place.start and part.type == spec.gpu.type]
    if len(uuids) != 1:
        instances = ", ".join(f"{part.type} at {'?' if part.start is None else part.start}" for part in parts)
        raise EnvironmentFaultError(
            f"gpu-let {spec.gpulet}: GPU {place.gpu_uuid} has no {spec.gpu.type} at {place.start}; it has "
            f"{instances or 'no MIG instances'}. Run `tenuto cluster` and plan on what is there."
        )
    environment["CUDA_VISIBLE_DEVICES"] = uuids[0]
    if spec.cuda_mps:
        environment.update(client_environment(uuids[0], spec.share_pct, spec.memory_mib))
    return spec.model_copy(update={"gpu": spec.gpu.model_copy(update={"uuid": uuids[0]})})


def join_shared_gpu(spec: GpuletSpec, *, has_driver: bool) -> SharedGpu | None:
    """Join a gpu-let to its GPU before CUDA starts; None when the plan asks for no CUDA MPS or no GPU is used.

    Without a driver this returns None too; `make_executor` then says what is missing.

    Raises:
        EnvironmentFaultError: the GPU cannot be shared as planned.
    """
    if not spec.cuda_mps or not has_driver or spec.executor == "emulated":
        return None
    shared = SharedGpu(spec)
    shared.join()
    return shared
