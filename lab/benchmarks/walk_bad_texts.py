"""Send models that generate the mistakes of clients, by every way in, and show what is told.

Run with `python lab/benchmarks/walk_bad_texts.py`: it serves a tiny language model with random weights on the CPU and
emulated ones, on a Ray of its own, and asks with curl, the package `openai`, Triton's gRPC client and the Python
handle. It prints a table. The exit code is 1 when a mistake has no 4xx, the openai package gets another answer than
curl, something ran, or the memory of a client that left is not free.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import openai
import tokenizers
from serving import heading
from tritonclient.grpc import InferenceServerClient, InferInput, aio

from tenuto.deployments.control.operations import begin, end_all
from tenuto.deployments.entry.service.python_handle import RequestFailedError, TenutoHandle
from tenuto.deployments.serve.deployment import Deployment
from tenuto.deployments.serve.endpoint import get_json
from tenuto.deployments.serve.launcher import Launcher, unused_port
from tenuto.errors import InvalidInputError
from tenuto.placement import Plan
from tenuto.profiles import StepCost

TINY = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 320,
    "eos_token_id": None,
    "bos_token_id": None,
}
MEMORY = 384  # tokens
TEMPLATE = """{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system role here') }}{% endif %}
{{ m.content }}{% endfor %}"""


def plan(folder: Path) -> Plan:
    """Return a real model, emulated ones with several tokenizers, and one without a head."""
    cost = StepCost.line(20.0, 0.0, 0.0, 0.0, 0.0).model_dump(mode="json")
    lengths = {"prompt_tokens": 20, "output_tokens": 20, "max_sequences": 8, "max_batch_tokens": 64}
    generates = {"rate_rps": 10, "slo": {"ttft_ms": 60_000, "tpot_ms": 1000}, "generates": lengths}
    latency = {"alpha_ms": 1.0, "beta_ms": 1.0}
    options: dict[str, dict[str, Any]] = {
        "real": {"config": TINY, "seed": 3, "tokenizer": "bytes"},
        "slow": {"tokenizer": "bytes"},
        "mute": {},
        "strict": {"tokenizer": str(folder / "strict")},
        "blunt": {"tokenizer": str(folder / "blunt")},
    }
    gpulets = [
        {
            "id": name,
            "gpu": "c" if name == "real" else "v",
            "share_pct": 20,
            "models": [
                {"name": name, "batch_size": 8, "kv_tokens": MEMORY, **({} if name == "real" else {"steps": cost})}
            ],
        }
        for name in options
    ]
    fixed = {"name": "fixed", "batch_size": 1, "latency": latency, "latency_ms": 2.0}
    gpulets.append({"id": "fixed", "gpu": "v", "share_pct": 20, "models": [fixed]})
    source = {"real": {"source": "transformers/llama"}}
    return Plan.from_data(
        {
            "policy": {"name": "none"},
            "gpus": [{"id": "c", "type": "cpu"}, {"id": "v", "type": "v100"}],
            "gpulets": gpulets,
            "models": [
                *({"name": n, "options": o, **source.get(n, {}), **generates} for n, o in options.items()),
                {"name": "fixed", "rate_rps": 10, "slo_ms": 60_000, "latency": latency},
            ],
        }
    )


def make_tokenizers(folder: Path) -> None:
    """Write a tokenizer with a template that takes no system message, and one without a template."""
    words = {word: number for number, word in enumerate(["<unk>", "hello", "world"])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    for name in ("strict", "blunt"):
        (folder / name).mkdir()
        made.save(str(folder / name / "tokenizer.json"))
    (folder / "strict" / "chat_template.jinja").write_text(TEMPLATE)


USER, SYSTEM = {"role": "user", "content": "hello"}, {"role": "system", "content": "hello"}
CHAT = "/v1/chat/completions"
# What is wrong, the path, the body, and the status that belongs to it.
CASES: list[tuple[str, str, dict[str, Any], int]] = [
    ("prompt beyond the positions", "/v1/completions", {"model": "real", "prompt": "x" * 400}, 400),
    ("prompt beyond the memory", "/v1/completions", {"model": "slow", "prompt": "x" * 400}, 400),
    ("chat beyond the memory", CHAT, {"model": "slow", "messages": [{"role": "user", "content": "x" * 400}]}, 400),
    ("`max_tokens` beyond the positions", "/v1/completions", {"model": "real", "prompt": "x", "max_tokens": 320}, 400),
    ("`max_tokens` beyond the memory", "/v1/completions", {"model": "slow", "prompt": "x", "max_tokens": 384}, 400),
    ("`max_tokens` of 0", "/v1/completions", {"model": "slow", "prompt": "x", "max_tokens": 0}, 400),
    ("`max_tokens` that is no number", "/v1/completions", {"model": "slow", "prompt": "x", "max_tokens": "many"}, 400),
    ("an unknown sampling field", "/v1/completions", {"model": "slow", "prompt": "x", "top_k": 3}, 400),
    ("a temperature of 3", "/v1/completions", {"model": "slow", "prompt": "x", "temperature": 3}, 400),
    ("`top_p` of 0", "/v1/completions", {"model": "slow", "prompt": "x", "top_p": 0}, 400),
    ("a seed of 70 bits", "/v1/completions", {"model": "slow", "prompt": "x", "seed": 1 << 70}, 400),
    ("`n` of 129", "/v1/completions", {"model": "slow", "prompt": "x", "n": 129}, 400),
    ("a prompt beside a token", "/v1/completions", {"model": "slow", "prompt": ["x", 1]}, 400),
    ("no prompt", "/v1/completions", {"model": "slow", "prompt": ""}, 400),
    ("a token that the model lacks", "/v1/completions", {"model": "real", "prompt": [300]}, 400),
    ("a negative token", "/v1/completions", {"model": "real", "prompt": [-1]}, 400),
    ("text without a tokenizer", "/v1/completions", {"model": "mute", "prompt": "x"}, 400),
    ("chat without a tokenizer", CHAT, {"model": "mute", "messages": [USER]}, 400),
    ("`stop` without a tokenizer", "/v1/completions", {"model": "mute", "prompt": [1], "stop": "x"}, 400),
    ("an empty `stop`", "/v1/completions", {"model": "slow", "prompt": "x", "stop": [""]}, 400),
    ("a chat without a template", CHAT, {"model": "blunt", "messages": [USER]}, 400),
    ("a chat that its template refuses", CHAT, {"model": "strict", "messages": [SYSTEM, USER]}, 400),
    ("no messages", CHAT, {"model": "strict", "messages": []}, 400),
    (
        "a message with a picture",
        CHAT,
        {
            "model": "slow",
            "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        },
        400,
    ),
    (
        "tools",
        CHAT,
        {
            "model": "slow",
            "messages": [USER],
            "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
        },
        400,
    ),
    (
        "a tool's call in a message",
        CHAT,
        {"model": "slow", "messages": [{"role": "assistant", "content": "", "tool_calls": [{"id": "a"}]}]},
        400,
    ),
    (
        "`response_format` of JSON",
        CHAT,
        {"model": "slow", "messages": [USER], "response_format": {"type": "json_object"}},
        400,
    ),
    ("`logprobs` of a chat", CHAT, {"model": "slow", "messages": [USER], "logprobs": True}, 400),
    ("`logprobs` of 0", "/v1/completions", {"model": "slow", "prompt": "x", "logprobs": 0}, 400),
    ("`best_of` of 3", "/v1/completions", {"model": "slow", "prompt": "x", "best_of": 3}, 400),
    ("a penalty", "/v1/completions", {"model": "slow", "prompt": "x", "presence_penalty": 0.5}, 400),
    ("17 stop strings", "/v1/completions", {"model": "slow", "prompt": "x", "stop": ["x"] * 17}, 400),
    (
        "`stream_options` without a stream",
        "/v1/completions",
        {"model": "slow", "prompt": "x", "stream_options": {"include_usage": True}},
        400,
    ),
    ("a model without a head", "/v1/completions", {"model": "fixed", "prompt": "x"}, 400),
    ("a chat with a model without a head", CHAT, {"model": "fixed", "messages": [USER]}, 400),
    ("an unknown model", "/v1/completions", {"model": "other", "prompt": "x"}, 404),
]


def curl(url: str, path: str, document: Any, *more: str) -> tuple[int, str]:
    """Ask with curl; return the status, and what the error says."""
    done = subprocess.run(
        ["curl", "-sS", "-m", "20", "-w", "\n%{http_code}", f"{url}{path}", "-d", json.dumps(document), *more],
        capture_output=True,
        text=True,
        check=False,
    )
    body, _, status = done.stdout.rpartition("\n")
    error = json.loads(body).get("error", "") if body.startswith("{") else body
    return int(status or 0), str(error["message"] if isinstance(error, dict) else error)


def by_openai(client: openai.OpenAI, path: str, document: dict[str, Any]) -> tuple[int, str]:
    """Ask with OpenAI's package."""
    given = dict(document)
    extra = {name: given.pop(name) for name in ("top_k",) if name in given}
    create = client.chat.completions.create if path == CHAT else client.completions.create
    try:
        create(**given, extra_body=extra)
    except openai.APIStatusError as error:
        body = error.body if isinstance(error.body, dict) else {}
        return error.status_code, str(body.get("message", error))
    return 200, ""


def _inputs(text: str, parameters: dict[str, Any]) -> list[InferInput]:
    inputs = []
    for name, value in (("text_input", text), ("sampling_parameters", json.dumps(parameters))):
        inputs.append(InferInput(name, [1], "BYTES"))
        inputs[-1].set_data_from_numpy(np.array([value.encode()], np.object_))
    return inputs


def by_grpc(client: InferenceServerClient, model: str, text: str, parameters: dict[str, Any]) -> str:
    """Ask with Triton's client, and return the error."""
    try:
        client.infer(model, _inputs(text, parameters))
    except Exception as error:  # the package has a kind of its own
        return str(error)
    return "answered"


# The same with curl alone: no field that OpenAI's package has, or another interface.
CURLED: list[tuple[str, str, Any, int]] = [
    (
        "a temperature that is no number",
        "/v1/completions",
        {"model": "slow", "prompt": "x", "temperature": float("nan")},
        400,
    ),
    ("a body that is no object", "/v1/completions", [1], 400),
    ("no model", "/v1/completions", {"prompt": "x"}, 400),
    ("tensors for a model that generates", "/v2/models/slow/infer", {"inputs": []}, 400),
    ("a picture for a model that generates", "/predict/slow", {"x": 1}, 400),
    ("the generate extension, a model without a head", "/v2/models/fixed/generate", {"text_input": "x"}, 400),
    ("the generate extension, an unknown model", "/v2/models/other/generate", {"text_input": "x"}, 404),
    ("the generate extension, an unknown field", "/v2/models/slow/generate", {"text_input": "x", "stream": True}, 400),
    (
        "the generate extension, an unknown parameter",
        "/v2/models/slow/generate_stream",
        {"text_input": "x", "parameters": {"top_k": 1}},
        400,
    ),
    (
        "the generate extension, an empty stop string",
        "/v2/models/slow/generate",
        {"text_input": "x", "parameters": {"stop": ""}},
        400,
    ),
    (
        "the generate extension, no room",
        "/v2/models/slow/generate",
        {"text_input": "x", "parameters": {"max_tokens": 384}},
        400,
    ),
]

GRPC: list[tuple[str, str, str, dict[str, Any]]] = [
    ("prompt beyond the positions", "real", "x" * 400, {}),
    ("prompt beyond the memory", "slow", "x" * 400, {}),
    ("`max_tokens` beyond the memory", "slow", "x", {"max_tokens": 384}),
    ("an unknown sampling field", "slow", "x", {"top_k": 3}),
    ("a temperature of 3", "slow", "x", {"temperature": 3}),
    ("an empty `stop`", "slow", "x", {"stop": ""}),
    ("text without a tokenizer", "mute", "x", {}),
    ("a model without a head", "fixed", "x", {}),
    ("an unknown model", "other", "x", {}),
]

HANDLE: list[tuple[str, str, Any, dict[str, Any]]] = [
    ("prompt beyond the positions", "real", "x" * 400, {}),
    ("prompt beyond the memory", "slow", "x" * 400, {}),
    ("`max_tokens` beyond the memory", "slow", "x", {"max_tokens": 384}),
    ("`max_tokens` of 0", "slow", "x", {"max_tokens": 0}),
    ("a temperature of 3", "slow", "x", {"temperature": 3.0}),
    ("a temperature that is no number", "slow", "x", {"temperature": float("nan")}),
    ("`top_p` of 0", "slow", "x", {"top_p": 0.0}),
    ("a seed of 70 bits", "slow", "x", {"seed": 1 << 70}),
    ("an empty `stop`", "slow", "x", {"stop": [""]}),
    ("a negative token", "real", [-1], {}),
    ("a token that the model lacks", "real", [300], {}),
    ("text without a tokenizer", "mute", "x", {}),
    ("a model without a head", "fixed", "x", {}),
    ("an unknown model", "other", "x", {}),
]


async def by_handle() -> list[tuple[str, str]]:
    """Ask from Python; return what is raised."""
    found = []
    async with await TenutoHandle.connect() as tenuto:
        for what, model, prompt, options in HANDLE:
            ask = tenuto.generate_tokens if isinstance(prompt, list) else tenuto.generate
            try:
                _ = [part async for part in ask(model, prompt, **options)]
                found.append((what, "answered"))
            except InvalidInputError as error:
                found.append((what, str(error)))
            except RequestFailedError as error:
                found.append((what, f"ASKED: {error}"))
            except Exception as error:
                found.append((what, f"{type(error).__name__}: {error}"))
    return found


LONG = {"max_tokens": 300}
STAGES = (
    "amid its body",
    "before its first token",
    "amid a stream",
    "before a whole answer",
    "amid a chat",
    "with its half of the connection, and reads on",
    "by gRPC",
    "from Python",
    "OpenAI's package",
)


async def leave_at_each_stage(port: int, grpc_port: int, status: Callable[[], Any]) -> list[str]:
    """Let a client leave at each stage of a request to a real model and an emulated one; return what is held or counted
    wrongly afterwards."""
    wrong = []
    async with await TenutoHandle.connect() as tenuto:
        for model in ("slow", "real"):
            for stage in STAGES:
                before = status()["models"][model]
                await _leave(stage, model, port, grpc_port, tenuto)
                since = time.monotonic()
                counted = 0 if stage in (STAGES[0], STAGES[5]) else 1
                while True:
                    now = status()
                    held = next(each for each in now["gpulets"] if each["id"] == model)
                    after = now["models"][model]
                    gone = sum(after[name] - before[name] for name in ("cancelled", "ok", "late", "failed"))
                    has_all = held["free_blocks"] in (None, MEMORY // 16)  # None: nothing was ever asked
                    if (held["generating"] == 0 and has_all and gone >= counted) or time.monotonic() - since > 20.0:
                        break
                    await asyncio.sleep(0.05)
                told = {name: after[name] - before[name] for name in after if name in before and name in OUTCOMES}
                told = {name: count for name, count in told.items() if count}
                free = f"{held['free_blocks'] or 'all'} of {MEMORY // 16} blocks free"
                print(f"| leaves {stage} | {model} | | {free}, counted as {told} |", flush=True)
                if held["generating"] or not has_all or sum(told.values()) > 1:
                    wrong.append(f"leaves {stage}, {model}: {held}, {told}")
    return wrong


OUTCOMES = ("ok", "late", "expired", "rejected", "failed", "cancelled")


async def _leave(stage: str, model: str, port: int, grpc_port: int, tenuto: TenutoHandle) -> None:
    if stage == "by gRPC":
        async with aio.InferenceServerClient(f"127.0.0.1:{grpc_port}") as client:

            async def one() -> AsyncIterator[dict[str, Any]]:
                yield {"model_name": model, "inputs": _inputs("x", LONG)}
                await asyncio.sleep(60.0)

            stream = client.stream_infer(one())
            await anext(aiter(stream))
            stream.cancel()
        return
    if stage == "from Python":
        parts = tenuto.generate(model, "x", **LONG)
        await anext(parts)
        await parts.aclose()  # type: ignore[attr-defined]
        return
    if stage == "OpenAI's package":
        async with openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none") as asker:
            opened = await asker.completions.create(model=model, prompt="x", stream=True, **LONG)
            async for _ in opened:
                break
            await opened.close()
        return
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    path = CHAT if "chat" in stage else "/v1/completions"
    asked: dict[str, Any] = {"model": model, **LONG, "stream": "stream" in stage or "chat" in stage}
    asked |= {"messages": [USER], "max_tokens": 200} if "chat" in stage else {"prompt": "x"}
    if "half" in stage:
        asked["max_tokens"] = 5
    body = json.dumps(asked).encode()
    writer.write(b"POST %b HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % (path.encode(), len(body)))
    writer.write(body[:10] if "body" in stage else body)
    await writer.drain()
    if "body" not in stage and (answer := await reader.readline() if asked["stream"] else b" 200 ").find(b" 200 ") < 0:
        raise SystemExit(f"{model} leaves {stage}: {answer!r} {await reader.read(1000)!r}")
    if "half" in stage:
        writer.write_eof()
        await reader.read()
    elif asked["stream"]:
        await reader.readuntil(b"data: ")
    elif "whole" in stage:
        await asyncio.sleep(0.3)
    writer.transport.abort()


def main() -> None:
    """Send everything, print the table."""
    heading("what clients of models that generate get wrong")
    wrong = []
    with tempfile.TemporaryDirectory(prefix="r") as made, Launcher() as launcher:
        folder = Path(made)
        make_tokenizers(folder)
        slower = folder / "slower.json"
        slower.write_text("{}")
        os.environ["TENUTO_EMULATED_SLOWER"] = str(slower)
        launcher.connect(num_gpus=1, address="local")
        end_all()
        grpc_port = unused_port()
        deployment = Deployment(plan=plan(folder), port=unused_port(), grpc_port=grpc_port)
        begin(launcher, deployment, "a run", "the laboratory")
        url = launcher.base_url

        status_url = f"{launcher.operator_url}/status"

        def steps() -> dict[str, int]:
            return {g["id"]: g["batches"] for g in get_json(status_url)["gpulets"]}

        before = steps()
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        print("| what | asked | status | told |\n|---|---|---|---|")
        for what, path, document, wanted in CASES:
            status, said = curl(url, path, document)
            print(f"| {what} | curl | {status} | {said} |", flush=True)
            again = by_openai(client, path, document)
            if status != wanted or again != (status, said):
                wrong.append(f"{what}: curl {status}, not {wanted}; openai {again}")
        for what, path, document, wanted in CURLED:
            status, said = curl(url, path, document)
            print(f"| {what} | curl | {status} | {said} |", flush=True)
            if status != wanted:
                wrong.append(f"{what}: curl {status}, not {wanted}")
        triton = InferenceServerClient(f"127.0.0.1:{grpc_port}")
        for what, model, text, parameters in GRPC:
            said = by_grpc(triton, model, text, parameters)
            print(f"| {what} | gRPC | | {said} |", flush=True)
            if "INVALID_ARGUMENT" not in said and "NOT_FOUND" not in said:
                wrong.append(f"{what}: gRPC {said}")
        for what, said in asyncio.run(by_handle()):
            print(f"| {what} | Python | | {said} |", flush=True)
            if said == "answered" or said.startswith("ASKED") or "Error" in said:
                wrong.append(f"{what}: Python {said}")
        if steps() != before:
            wrong.append(f"something ran: {before} became {steps()}")
        wrong += asyncio.run(leave_at_each_stage(deployment.port, grpc_port, lambda: get_json(status_url)))
        asked = {"model": "slow", "prompt": "x", "max_tokens": 3}
        never = curl(url, "/v1/completions", {**asked, "stop": "never met"})
        print(f"| a stop string that is never met | curl | {never[0]} | |")
        slower.write_text("no JSON")
        failed = curl(url, "/v1/completions", asked)
        print(f"| a step that fails | curl | {failed[0]} | {failed[1]} |")
        slower.write_text("{}")
        time.sleep(0.5)
        good = curl(url, "/v1/completions", asked)
        print(f"| the next request | curl | {good[0]} | |")
        if (never[0], failed[0], good[0]) != (200, 503, 200):
            wrong.append("a stop string, a step that fails, or the request after it")
    print("\n".join([f"NO {each}" for each in wrong] or ["each as it should be, and nothing ran"]))
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
