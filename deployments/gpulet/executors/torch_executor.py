"""Runs programs with PyTorch, on the CPU or on a CUDA device.

On a CPU a share is a number of threads: 50 % of two cores is one thread. On CUDA, CUDA MPS enforces the share, which
the environment sets before the process starts; the memory cap is set on PyTorch's allocator here.
"""

from __future__ import annotations

import gc
import logging
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

from tenuto.deployments.serve.user_config import GeneratesEntry, MemberEntry, ProgramEntry
from tenuto.errors import refused
from tenuto.profiles.networks.catalogue import ModelSignature, is_exported
from tenuto.profiles.networks.cpu_share import calm_openmp, cpu_threads
from tenuto.profiles.networks.device import cuda_streams, pick_device
from tenuto.profiles.networks.generating import Generator, Sampling, longest_sequence
from tenuto.profiles.networks.import_factory import check_path
from tenuto.profiles.networks.inputs import Arrays, Blocks
from tenuto.profiles.networks.model_options import BuildOptions, ModelOptions, with_most_sizes
from tenuto.profiles.networks.programs import Member, load_program, naming
from tenuto.profiles.networks.runner import ProgramRunner, Streams
from tenuto.profiles.networks.tokenizer_files import tokenizer_place

logger = logging.getLogger("ray.serve")

_DTYPES = {"auto": "auto", "fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}

SAME = 0.01  # limit: sizes differ this much by a runtime's file; other networks or formats differ more
_ROUNDED_MIB = 0.01  # derived: profiles give weights with two decimals


class TorchExecutor:
    """Owns one device. Invariant: `load`, `run` and `unload` are called by one thread, one at a time."""

    def __init__(
        self,
        device: str = "cpu",
        *,
        share_pct: float | None = None,
        memory_mib: float | None = None,
        cores: int | None = None,
        streaming: bool = False,
    ) -> None:
        """Choose the device.

        Args:
            device: `cpu`, `cuda` or `auto`; on CUDA the first visible device, which the plan pins by UUID.
            share_pct: on the CPU, the percentage of cores to use; on CUDA the environment already sets the share.
            memory_mib: on CUDA, the allocator's limit; the CPU has none.
            cores: the number of CPU cores; by default those this process may use.
            streaming: whether copies get streams of their own, and the device gets room for a second batch.

        Raises:
            EnvironmentFaultError: CUDA was asked for and this torch or machine has none.
        """
        calm_openmp(os.environ)
        import torch

        self._torch = torch
        self._programs: dict[str, ProgramRunner] = {}
        self._generators: dict[str, tuple[Generator, ModelSignature, str]] = {}  # with how each runs
        self.streams: Streams | None = cuda_streams(pick_device(device), overlapping=streaming)  # None on the CPU
        self._threads: int | None = None
        if self.streams is None:
            self._threads = cpu_threads(share_pct, cores)
            self.device = "cpu"
            return
        self.device = f"cuda:0 {torch.cuda.get_device_name(0)}"
        if memory_mib is not None:
            total_mib = torch.cuda.get_device_properties(0).total_memory / 2**20
            torch.cuda.set_per_process_memory_fraction(min(1.0, memory_mib / total_mib), 0)

    def load(self, program: ProgramEntry, batch_sizes: Sequence[int], prepared_file: str | None = None) -> None:
        """Build a program and run every batch size `warmup_runs` times; see `load_program` for the errors."""
        self.use_threads()
        self.unload(program.name)
        if program.generates is not None:
            self._generators[program.name] = self._generating(program, program.generates)
            return
        planned = [each.sizes for each in program.by_size]
        most = {name: max(sizes[name] for sizes in planned) for sizes in planned[:1] for name in sizes}
        members = [
            Member(
                m.name,
                m.source,
                m.weights_path,
                with_most_sizes(m.options, most if is_exported(m.source or "") else {}),
            )
            for m in program.members
        ]
        loaded = self._programs[program.name] = load_program(members, batch_sizes, self.streams, prepared_file)
        for note in (*loaded.network.notes, *_other_weights(loaded.network.weights_mib, program.weights_mib)):
            logger.warning("%s: %s", program.name, note)

    def _generating(self, program: ProgramEntry, generates: GeneratesEntry) -> tuple[Generator, ModelSignature, str]:
        """Build a generative model, and run a step of each kind, so that the first request is not the slowest."""
        (member,) = program.members
        origin = f"options of {member.name}"
        parsed = ModelOptions.parse(member.options, origin)
        runtime, dtype = parsed.run.runtime, _DTYPES[parsed.run.dtype]
        if runtime not in ("torch", "vllm"):
            raise refused(f"{origin}: runtime", runtime, "runs no model that generates", "Use vllm or torch.")
        build = self._by_vllm if runtime == "vllm" else self._by_transformers
        with naming(member.name):
            made, config = build(member, parsed.checked_build(origin), dtype, generates)
        vocabulary = int(config.get_text_config().vocab_size)
        limits = generates.limits(longest_sequence(config), vocabulary, made.refuses)
        made.add(0, [0], Sampling(2))
        for _ in range(2):
            made.step([(0, 1)])
        way = "vllm" if runtime == "vllm" else "continuous batching"
        return made, ModelSignature("tensor", (), (), generates=limits), way

    def _by_transformers(
        self, member: MemberEntry, options: BuildOptions, dtype: str, generates: GeneratesEntry
    ) -> tuple[Generator, Any]:
        from tenuto.profiles.networks.language_model import LanguageModel, load_language_model

        network = load_language_model(
            member.source or member.name, weights_path=member.weights_path, seed=options.seed, config=options.config
        )
        if dtype != "auto":
            network = network.to(getattr(self._torch, dtype))
        made = LanguageModel(
            network,
            device="cpu" if self.streams is None else "cuda",
            blocks=generates.blocks,
            block_tokens=generates.block_tokens,
            max_batch_tokens=generates.max_batch_tokens,
            tokenizer=tokenizer_place(options.tokenizer, member.weights_path or member.source),
        )
        return made, network.config

    def _by_vllm(
        self, member: MemberEntry, options: BuildOptions, dtype: str, generates: GeneratesEntry
    ) -> tuple[Generator, Any]:
        folder = member.weights_path or member.source or ""
        check_path(folder, "weights_path")
        if not os.path.isdir(folder):
            raise refused(
                "source", folder, "is no folder of weights, which vLLM needs", "Give what save_pretrained wrote."
            )
        from tenuto.profiles.networks.vllm_model import VllmModel

        made = VllmModel(
            folder,
            blocks=generates.blocks,
            block_tokens=generates.block_tokens,
            max_sequences=generates.max_sequences,
            max_batch_tokens=generates.max_batch_tokens,
            longest=generates.longest_context,
            dtype=dtype,
            seed=options.seed,
            tokenizer=tokenizer_place(options.tokenizer, folder),
        )
        return made, made.config

    def generator(self, program: str) -> Generator:
        """Return what runs a loaded program that generates; KeyError if there is none."""
        self.use_threads()
        return self._generators[program][0]

    def retime(self, program: ProgramEntry) -> None:
        """Do nothing: a real device takes its own time."""

    def unload(self, program: str) -> None:
        """Release a program and its device memory; a program that is not loaded is ignored."""
        generating = self._generators.pop(program, None)
        if generating is not None:
            generating[0].close()
        elif self._programs.pop(program, None) is None:
            return
        gc.unfreeze()  # a network contains reference cycles, which `spare_the_collector` hid from the collector
        gc.collect()
        if self.streams is not None:
            self._torch.cuda.empty_cache()

    def signature(self, model: str) -> ModelSignature:
        """Return the signature of a member of a loaded program; KeyError if none has it."""
        if model in self._generators:
            return self._generators[model][1]
        for program in self._programs.values():
            if model in program.signatures:
                return program.signatures[model]
        raise KeyError(model)

    def run(
        self, program: str, inputs: Mapping[str, Blocks], rows: Mapping[str, int]
    ) -> tuple[dict[str, list[Arrays]], float]:
        """Run one batch (padded with the option `pad_batches`); return outputs by member and the time in ms.

        The time covers everything from numpy to numpy, with copies to and from the device, as profiles do.

        Raises:
            InvalidInputError: an integer input is outside the model's range; this is found before anything runs.
        """
        self.use_threads()
        started = time.perf_counter()
        outputs, _ = self._programs[program].run_timed(inputs, rows)
        return outputs, (time.perf_counter() - started) * 1000.0

    def facts(self) -> dict[str, Any]:
        """Return figures of each program with several members."""
        return {name: facts for name, program in self._programs.items() if (facts := program.network.facts())}

    def ways(self) -> dict[str, str]:
        """Return how each program runs. A program that cannot be captured runs without CUDA graphs, unless asked
        for."""
        ways = {name: program.network.way for name, program in self._programs.items()}
        return ways | {name: way for name, (_, _, way) in self._generators.items()}

    def program(self, name: str) -> ProgramRunner:
        """Return the runner of a loaded program; KeyError if it is not loaded."""
        return self._programs[name]

    def sm_count(self) -> int | None:
        """Return the multiprocessors that CUDA gives this process; None on the CPU."""
        if self.streams is None:
            return None
        return int(self._torch.cuda.get_device_properties(0).multi_processor_count)

    def memory_mib(self) -> float | None:
        """Return what PyTorch's allocator has reserved on the CUDA device; None on the CPU, where nothing is
        counted."""
        return None if self.streams is None else self._torch.cuda.memory_reserved(0) / 2**20

    def close(self) -> None:
        """Release all programs and the device's cached memory."""
        self._programs.clear()
        self._generators.clear()
        if self.streams is not None:
            self._torch.cuda.empty_cache()

    def use_threads(self) -> None:
        """Set the number of threads of the share. OpenMP keeps it per calling thread, so the worker thread must call
        this."""
        if self._threads is not None and self._torch.get_num_threads() != self._threads:
            self._torch.set_num_threads(self._threads)


def _other_weights(built_mib: float, profiled_mib: float | None) -> list[str]:
    """Return a line saying that a model's weights have another size than the profiled ones, if that is so."""
    if profiled_mib is None or abs(built_mib - profiled_mib) <= max(_ROUNDED_MIB, SAME * max(built_mib, profiled_mib)):
        return []
    # Format: digits of a message.
    built, profiled = (f"{mib:,.1f}" if mib >= 10.0 else f"{mib:.4g}" for mib in (built_mib, profiled_mib))
    sizes = f"its weights are {built} MiB, those of its profile {profiled} MiB"
    return [f"{sizes}: another network was measured, and what the plan expects need not hold; profile it again"]
