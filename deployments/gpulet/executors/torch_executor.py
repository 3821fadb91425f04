"""Runs programs with PyTorch: on the CPU with the threads of a share, or on a CUDA device through pinned buffers.

On a CPU a share is a number of threads: 50 % of two cores is one thread. On CUDA the share is CUDA MPS' business, set
in the environment before the process starts; the memory cap is set on PyTorch's allocator here.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from tenuto.deployments.gpulet.executors.base import Arrays, Blocks, stacked
from tenuto.deployments.serve.user_config import ProgramEntry
from tenuto.errors import EnvironmentFaultError
from tenuto.profiles.networks.catalogue import LoadedModel, ModelSignature
from tenuto.profiles.networks.cpu_share import calm_openmp, cpu_threads
from tenuto.profiles.networks.run_options import RunOptions
from tenuto.profiles.networks.torch_runner import TorchRunner, blank_inputs, pick_device, split_options

__all__ = ["TorchExecutor"]


class _Runner(Protocol):
    """A program on the device: `_LoneRunner`, or `MergedRunner` where several models run as one."""

    @property
    def signatures(self) -> Mapping[str, ModelSignature]: ...

    def run(self, inputs: Mapping[str, Arrays], sizes: Mapping[str, int]) -> dict[str, Arrays]: ...

    def warm_up(self, batch_sizes: Sequence[int], runs: int) -> None: ...

    @property
    def facts(self) -> Mapping[str, float | int]: ...


class _LoneRunner:
    """A model that is a program by itself."""

    def __init__(self, name: str, runner: TorchRunner) -> None:
        self._name = name
        self.runner = runner
        self.signatures: Mapping[str, ModelSignature] = {name: runner.signature}

    def run(self, inputs: Mapping[str, Arrays], sizes: Mapping[str, int]) -> dict[str, Arrays]:
        return {self._name: self.runner.run(inputs[self._name], sizes[self._name])}

    def warm_up(self, batch_sizes: Sequence[int], runs: int) -> None:
        del batch_sizes  # the runner knows which sizes it pads to
        for size in self.runner.warm_sizes:
            blank = blank_inputs(self.runner.signature, size)
            for _ in range(runs):
                self.runner.run(blank, size)

    @property
    def facts(self) -> Mapping[str, float | int]:
        return {}


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
        self._runners: dict[str, _Runner] = {}
        self._threads: int | None = None
        self._stream: Any = None
        if self._kind == "cpu":
            self._threads = cpu_threads(share_pct, cores)
            self.device = "cpu"
            return
        self.device = f"cuda:0 {torch.cuda.get_device_name(0)}"
        if memory_mib is not None:
            total_mib = torch.cuda.get_device_properties(0).total_memory / 2**20
            torch.cuda.set_per_process_memory_fraction(min(1.0, memory_mib / total_mib), 0)
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def load(self, program: ProgramEntry, batch_sizes: Sequence[int]) -> None:
        """Build a program's models, merge them where there are several, and run every batch size `warmup_runs` times.

        Raises:
            InvalidInputError: unknown models or options, weights that do not fit, models that do not merge.
            EnvironmentFaultError: not enough memory on the device, or the model cannot be compiled or captured.
        """
        from tenuto.profiles.networks.models import build

        self.use_threads()
        loaded, options = {}, {}
        for member in program.members:
            run_options, build_options = split_options(member.options, f"options of {member.name}")
            options[member.name] = run_options
            source = member.source or member.name
            loaded[member.name] = build(source, weights_path=member.weights_path, options=build_options)
        self.unload(program.name)
        try:
            runner = self._runner(program.name, loaded, options, batch_sizes)
            loaded.clear()
            self._runners[program.name] = runner
            runner.warm_up(batch_sizes, max(o.warmup_runs for o in options.values()))
        except self._torch.OutOfMemoryError as error:
            self.unload(program.name)
            raise EnvironmentFaultError(
                f"'{program.name}' does not fit into the device's memory at batch {max(batch_sizes)}. Plan a smaller "
                "batch, fewer models on this GPU, or a larger memory cap."
            ) from error
        except BaseException:
            self.unload(program.name)
            raise

    def _runner(
        self, program: str, loaded: Mapping[str, LoadedModel], options: Mapping[str, RunOptions],
        batch_sizes: Sequence[int],
    ) -> _Runner:
        """Put the models of a program on the device."""
        if len(loaded) == 1:
            ((name, model),) = loaded.items()
            return _LoneRunner(
                name,
                TorchRunner(
                    model, self._kind, options[name], batch_sizes=batch_sizes, stream=self._stream, name=program
                ),
            )
        from tenuto.profiles.networks.merging.runner import MergedRunner, check_run_options

        for name, run_options in options.items():
            check_run_options(name, run_options)
        return MergedRunner.of(loaded, self._kind, stream=self._stream)

    def unload(self, program: str) -> None:
        """Release a program and return its device memory; one that is not loaded is ignored."""
        if self._runners.pop(program, None) is not None and self._stream is not None:
            self._torch.cuda.empty_cache()

    def signature(self, model: str) -> ModelSignature:
        """Return the signature of a member of a loaded program; KeyError if none has it."""
        for runner in self._runners.values():
            if model in runner.signatures:
                return runner.signatures[model]
        raise KeyError(model)

    def run(
        self, program: str, inputs: Mapping[str, Blocks], rows: Mapping[str, int]
    ) -> tuple[dict[str, Arrays], float]:
        """Run one batch (padded with the option `pad_batches`); return outputs by member and the time in ms.

        The time covers everything from numpy to numpy, copies to and from the device included, as profiles do.

        Raises:
            InvalidInputError: an integer input is outside the model's range; found before anything ran.
        """
        self.use_threads()
        started = time.perf_counter()
        arrays = {name: stacked(inputs[name]) for name, count in rows.items() if count}
        outputs = self._runners[program].run(arrays, rows)
        return outputs, (time.perf_counter() - started) * 1000.0

    def merged(self) -> dict[str, Any]:
        """Return what merging did, by program."""
        return {name: dict(runner.facts) for name, runner in self._runners.items() if len(runner.signatures) > 1}

    @property
    def stream(self) -> Any:
        """The CUDA stream that every model's kernels run on; None on the CPU."""
        return self._stream

    def runner(self, program: str) -> TorchRunner:
        """Return what runs a model that is a program by itself; KeyError if there is none."""
        runner = self._runners[program]
        if not isinstance(runner, _LoneRunner):
            raise KeyError(program)
        return runner.runner

    def sm_count(self) -> int | None:
        """Return the multiprocessors that CUDA gives this process; None on the CPU."""
        if self._stream is None:
            return None
        return int(self._torch.cuda.get_device_properties(0).multi_processor_count)

    def memory_mib(self) -> float | None:
        """Return what PyTorch's allocator has reserved on the CUDA device; None on the CPU, which has no ledger."""
        return None if self._stream is None else self._torch.cuda.memory_reserved(0) / 2**20

    def close(self) -> None:
        """Release all programs and the device's cached memory."""
        self._runners.clear()
        if self._stream is not None:
            self._torch.cuda.empty_cache()

    def use_threads(self) -> None:
        """Set the threads of the share; OpenMP keeps them per calling thread, so the worker thread itself must."""
        if self._threads is not None and self._torch.get_num_threads() != self._threads:
            self._torch.set_num_threads(self._threads)
