"""The protocol of executors, which run batches: PyTorch on CPU, PyTorch on CUDA, and the emulated GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from tenuto.deployments.serve.user_config import ProgramEntry
from tenuto.profiles.networks.catalogue import ModelSignature
from tenuto.profiles.networks.generating import Generator
from tenuto.profiles.networks.inputs import Arrays, Blocks


class Executor(Protocol):
    """Owns the device of one gpu-let. Every method is called on one worker thread, never on an event loop.

    It runs programs: one or more models that run as one. `device` says where batches really run: `cpu`, `cuda:0 NVIDIA
    …`, or `emulated v100`.
    """

    device: str

    def load(self, program: ProgramEntry, batch_sizes: Sequence[int], prepared_file: str | None = None) -> None:
        """Build a program and warm up every batch size, so that the first request is not the slowest.

        `prepared_file`: the network of a program with several members; see `load_program`.
        """

    def unload(self, program: str) -> None:
        """Release a program; one that is not loaded is ignored."""

    def signature(self, model: str) -> ModelSignature:
        """Return the signature of a member of a loaded program; KeyError if none has it."""

    def generator(self, program: str) -> Generator:
        """Return what runs a loaded program that generates; KeyError if there is none."""

    def retime(self, program: ProgramEntry) -> None:
        """Take new expectations of a loaded program that generates, which change nothing about what is loaded."""

    def run(
        self, program: str, inputs: Mapping[str, Blocks], rows: Mapping[str, int]
    ) -> tuple[dict[str, list[Arrays]], float]:
        """Run one batch and return the outputs of every member that has rows in it, and the execution time in ms. Rows
        that follow each other with outputs of equal shapes are one part of a member's outputs.

        Args:
            program: a loaded program.
            inputs: the inputs by member. Their arrays may lie in read-only memory that others will overwrite later.
            rows: the number of rows by member; members without rows may be left out.
        """

    def facts(self) -> dict[str, Any]:
        """Return figures of each program with several members, for the status."""

    def ways(self) -> dict[str, str]:
        """Return how each program really runs: plain, cuda_graphs, compile, emulated, or another runtime."""

    def sm_count(self) -> int | None:
        """Return how many multiprocessors this process may use; None if the device has none."""

    def memory_mib(self) -> float | None:
        """Return the device memory in use; None if the device does not count it."""

    def close(self) -> None:
        """Release the device."""
