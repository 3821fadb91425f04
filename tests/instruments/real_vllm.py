"""Runs vLLM itself, with the Python of an environment that has it: reads what to write from the standard input, and
prints what was written as the last line of the standard output. Needs no pytest."""

from __future__ import annotations

import json
import random
import sys
from typing import Any

from tenuto.deployments.gpulet.executors.torch_executor import TorchExecutor
from tenuto.deployments.serve.user_config import GeneratesEntry, MemberEntry, ProgramEntry
from tenuto.profiles.networks.generating import Generator, Sampling

# vLLM on a CPU takes blocks of a multiple of 32.
GENERATES = GeneratesEntry(kv_tokens=512, block_tokens=32, max_sequences=8, max_batch_tokens=256)


def run(model: Generator, asked: list[dict[str, Any]], draws: random.Random) -> list[dict[str, Any]]:
    """Return what is written for prompts, in steps as a scheduler may choose them: also decoding that waits, and
    sequences that lose their memory."""
    unread = {n: len(each["prompt"]) for n, each in enumerate(asked)}
    made: dict[int, list[int]] = {n: [] for n in unread}
    ended: dict[int, str] = {}
    for number, each in enumerate(asked):
        model.add(number, each["prompt"], Sampling(**each["sampling"]))
    while len(ended) < len(asked):
        going = sorted(made.keys() - ended.keys())
        if draws.random() < 0.05:
            number = draws.choice(going)
            model.preempt(number)
            unread[number] = len(asked[number]["prompt"]) + len(made[number])
        chunks = [(n, min(unread[n], draws.randint(1, 32)) or 1) for n in going if draws.random() < 0.7]
        if not chunks:
            continue
        ran = model.step(chunks)
        for number, tokens in chunks:
            unread[number] = max(0, unread[number] - tokens)
        for number, token in ran.tokens.items():
            made[number].append(token)
        ended |= {number: ending.value for number, ending in ran.ended.items()}
    return [{"tokens": made[n], "ended": ended[n]} for n in made]


def main() -> None:
    """Write what is asked for, twice."""
    asked = json.load(sys.stdin)
    member = MemberEntry(name="m", source=asked["folder"], options={"runtime": "vllm"})
    executor = TorchExecutor("cpu")
    executor.load(ProgramEntry(name="m", batch_size=8, members=(member,), generates=GENERATES), ())
    model = executor.generator("m")
    runs = [run(model, asked["sequences"], random.Random(seed)) for seed in (1, 2)]
    left = model.blocks - model.free_blocks
    executor.unload("m")
    print(json.dumps({"runs": runs, "held_blocks": left}))


if __name__ == "__main__":
    main()
