"""Runs batches with PyTorch: on the CPU with the threads of a share, or on a CUDA device through pinned buffers.

On a CPU a share is a number of threads: 50 % of two cores is one thread. On CUDA the share is CUDA MPS' business, set
in the environment before the process starts; the memory cap is set on PyTorch's allocator here.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

from tenuto.deployments.gpulet.executors.base import Arrays
from tenuto.deployments.gpulet.executors.merged_models import MergedModels
from tenuto.errors import EnvironmentFaultError
from tenuto.profiles.networks.cpu_share import calm_openmp, cpu_threads
from tenuto.profiles.networks.torch_runner import TorchRunner, blank_inputs, pick_device, split_options

__all__ = ["TorchExecutor"]


class TorchExecutor:
    """Owns one device. Invariant: `load`, `run` and `unload` are called by one thread, one at a time."""

    def __init__(
        self, device: str = "cpu", *, share_pct: float | None = None, memory_mib: float | None = None,
        cores: int | None = None,
    ) -> None:
        """Choose the device.

        Args:
            device: `cpu`, `cuda` or `auto`; on CUDA the first visible device, which the plan pins by UUID.
            share_pct: on the CPU, the percentage of cores to use; on CUDA the environment has it already.
            memory_mib: on CUDA, the allocator's limit; the CPU has none.
            cores: of the CPU; default those this process may use.

        Raises:
            EnvironmentFaultError: CUDA was asked for and this torch or machine has none.
        """
        calm_openmp(os.environ)
        import torch

        self._torch = torch
        self._kind = pick_device(device)
        self._runners: dict[str, TorchRunner] = {}
        self._threads: int | None = None
        self._stream: Any = None
        if self._kind == "cpu":
            self._threads = cpu_threads(share_pct, cores)
            self._merged = MergedModels(self._kind)
            self.device = "cpu"
            return
        self.device = f"cuda:0 {torch.cuda.get_device_name(0)}"
        if memory_mib is not None:
            total_mib = torch.cuda.get_device_properties(0).total_memory / 2**20
            torch.cuda.set_per_process_memory_fraction(min(1.0, memory_mib / total_mib), 0)
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._merged = MergedModels(self._kind, self._stream)

    def load(
        self, replica_name: str, source: str | None, *, weights_path: str | None, options: Mapping[str, Any],
        batch_sizes: Sequence[int],
    ) -> None:
        """Build a model and run every batch size `warmup_runs` times.

        Raises:
            InvalidInputError: unknown model or options, weights that do not fit.
            EnvironmentFaultError: not enough memory on the device, or the model cannot be compiled or captured.
        """
        from tenuto.profiles.networks.models import build

        self.use_threads()
        run_options, build_options = split_options(options, f"options of {replica_name}")
        loaded = build(source or replica_name, weights_path=weights_path, options=build_options)
        self.unload(replica_name)
        try:
            self._runners[replica_name] = TorchRunner(
                loaded, self._kind, run_options, batch_sizes=batch_sizes, stream=self._stream, name=replica_name
            )
            for size in self._runners[replica_name].warm_sizes:
                blank = blank_inputs(loaded.signature, size)
                for _ in range(run_options.warmup_runs):
                    self.run(replica_name, blank, size)
        except self._torch.OutOfMemoryError as error:
            self.unload(replica_name)
            raise EnvironmentFaultError(
                f"'{replica_name}' does not fit into the device's memory at batch {max(batch_sizes)}. Plan a smaller "
                "batch, fewer models on this GPU, or a larger memory cap."
            ) from error
        except BaseException:
            self.unload(replica_name)
            raise

    def unload(self, replica_name: str) -> None:
        """Release a model and return its device memory; one that is not loaded is ignored."""
        held = self._merged.unload(replica_name) or self._runners.pop(replica_name, None) is not None
        if held and self._stream is not None:
            self._torch.cuda.empty_cache()

    def load_merged(self, name: str, members: Sequence[Mapping[str, Any]], batch_sizes: Sequence[int]) -> None:
        """Build several models as one merged program; see `MergedModels.load` for the errors."""
        self.use_threads()
        self._merged.load(name, members, batch_sizes)

    def run_merged(
        self, name: str, inputs: Mapping[str, Arrays], sizes: Mapping[str, int]
    ) -> tuple[dict[str, Arrays], float]:
        """Run a joint batch of a merged program; return outputs by member and the time in ms."""
        self.use_threads()
        return self._merged.run(name, inputs, sizes)

    def merged(self) -> dict[str, Any]:
        """Return what merging did, by group."""
        return self._merged.facts()

    def signature(self, replica_name: str) -> dict[str, Any]:
        """Return a loaded model's signature as plain data; see `ModelSignature.to_data`."""
        runner = self._runners.get(replica_name)
        return self._merged.signature(replica_name) if runner is None else runner.signature.to_data()

    def run(self, replica_name: str, inputs: Arrays, batch_size: int) -> tuple[Arrays, float]:
        """Run one batch of exactly `batch_size` (more with the option `pad_batches`); return outputs and time in ms.

        The time covers everything from numpy to numpy, copies to and from the device included, as profiles do.

        Raises:
            InvalidInputError: an integer input is outside the model's range; found before anything ran.
        """
        self.use_threads()
        started = time.perf_counter()
        outputs = self._runners[replica_name].run(inputs, batch_size)
        return outputs, (time.perf_counter() - started) * 1000.0

    @property
    def stream(self) -> Any:
        """The CUDA stream that every model's kernels run on; None on the CPU."""
        return self._stream

    def runner(self, replica_name: str) -> TorchRunner:
        """Return what runs a loaded model; KeyError if there is none."""
        return self._runners[replica_name]

    def sm_count(self) -> int | None:
        """Return the multiprocessors that CUDA gives this process; None on the CPU."""
        if self._stream is None:
            return None
        return int(self._torch.cuda.get_device_properties(0).multi_processor_count)

    def memory_mib(self) -> float | None:
        """Return what PyTorch's allocator has reserved on the CUDA device; None on the CPU, which has no ledger."""
        return None if self._stream is None else self._torch.cuda.memory_reserved(0) / 2**20

    def close(self) -> None:
        """Release all models and the device's cached memory."""
        self._runners.clear()
        self._merged.clear()
        if self._stream is not None:
            self._torch.cuda.empty_cache()

    def use_threads(self) -> None:
        """Set the threads of the share; OpenMP keeps them per calling thread, so the worker thread itself must."""
        if self._threads is not None and self._torch.get_num_threads() != self._threads:
            self._torch.set_num_threads(self._threads)
