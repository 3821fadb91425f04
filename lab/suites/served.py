"""The server that other people's programs ask: one deployment on this machine, with real networks on the processor and
emulated ones."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from environments import UnavailableError

STARTS_S = 420.0  # limit: two busy cores take a minute
ENDS_S = 90.0  # limit: open streams have 30 s to end
LATENCY = {"alpha_ms": 0.2, "beta_ms": 2.0}
STEPS = {"prefill_ms": [[0, 10], [1000, 60]], "decode_ms": [[0, 10], [1000, 60]]}
QUICK_STEPS = {"prefill_ms": [[0, 1], [1000, 6]], "decode_ms": [[0, 1], [1000, 6]]}
WORDS = 512  # of the tokenizer
NETWORK = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "vocab_size": WORDS,
    "max_position_embeddings": 4096,
    "bos_token_id": None,
    "eos_token_id": 0,  # the tokenizer's <end>; Llama's own would be a text of this tokenizer
}
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@dataclass(frozen=True)
class Server:
    """Where it answers, and the folder of the tokenizer that `tiny` and `chat` have.

    Models: `simple`, `simple_int8`, `densenet_onnx` (real networks), `synthetic` (emulated), `tiny` (a real language
    model with random weights), `chat` (an emulated one).
    """

    http_port: int
    grpc_port: int
    operator_port: int
    tokenizer: Path

    @property
    def url(self) -> str:
        """Of the gateway."""
        return f"http://127.0.0.1:{self.http_port}"

    @property
    def operator_url(self) -> str:
        """Of status and metrics."""
        return f"http://127.0.0.1:{self.operator_port}"

    @property
    def grpc(self) -> str:
        """Host and port of gRPC."""
        return f"127.0.0.1:{self.grpc_port}"


def get(url: str) -> bytes:
    """Return what a GET brings; raises `OSError`."""
    with urllib.request.urlopen(url, timeout=30.0) as answer:
        body: bytes = answer.read()
        return body


def make_tokenizer(folder: Path) -> None:
    """Write a tokenizer with a chat template and an end of text, as `save_pretrained` lays it.

    It is trained on the README. Each of its tokens is a text of its own, so that each can be sent as soon as it comes.
    Its decoder is that of Llama 2, which llguidance knows; it does not know Metaspace.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE(unk_token="<unknown>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=WORDS,
        initial_alphabet=[chr(code) for code in range(33, 127)],
        special_tokens=["<end>", "<unknown>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator([(Path(__file__).parents[2] / "README.md").read_text("utf-8")], trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<end>",
        "pad_token": "<end>",
        "unk_token": "<unknown>",
        "model_max_length": NETWORK["max_position_embeddings"],
        "clean_up_tokenization_spaces": False,
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), "utf-8")
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **NETWORK}), "utf-8")


def plan(tokenizer: Path, writers: Sequence[str] = ()) -> dict[str, Any]:
    """Return the plan. `writers` are further names of emulated models that generate."""
    gpus: list[dict[str, Any]] = []
    gpulets: list[dict[str, Any]] = []
    models: list[dict[str, Any]] = []

    def add(kind: str, spec: dict[str, Any], replica: dict[str, Any]) -> None:
        place = f"n0/{len(gpus)}"
        gpus.append({"id": place, "type": kind})
        gpulets.append({"id": f"{place}/a", "gpu": place, "models": [{"name": spec["name"], **replica}]})
        models.append(spec)

    fixed = {"batch_size": 16, "latency": LATENCY, "latency_ms": 16 * LATENCY["alpha_ms"] + LATENCY["beta_ms"]}
    for name, source, options in (
        ("simple", "simple", {}),
        ("simple_int8", "simple", {"datatype": "int8"}),
        ("simple_string", "texts", {}),
        ("simple_identity", "identity", {}),
        ("densenet_onnx", "pictures", {}),
    ):
        # An SLO that a busy machine meets too: these are asked for what they answer, not how fast.
        spec = {"source": f"suite_models:{source}", "rate_rps": 10, "slo_ms": 10_000, "latency": LATENCY}
        add("cpu", {"name": name, **spec, "options": options}, fixed)
    add("v100", {"name": "synthetic", "rate_rps": 500, "slo_ms": 1000, "latency": LATENCY}, fixed)
    generates = {"prompt_tokens": 100, "output_tokens": 50, "max_sequences": 64, "max_batch_tokens": 1024}
    writes = {
        "rate_rps": 10,
        "slo": {"ttft_ms": 20_000, "tpot_ms": 2000},
        "generates": generates,
        "options": {"tokenizer": str(tokenizer)},
    }
    source = {"source": "transformers/llama", "options": {**writes["options"], "config": NETWORK}}
    add("cpu", {"name": "tiny", **writes, **source}, {"batch_size": 16, "kv_tokens": 32_768})
    add("v100", {"name": "chat", **writes}, {"batch_size": 64, "kv_tokens": 131_072, "steps": STEPS})
    # Asked without a bound: their memory ends an answer soon.
    for name in writers:
        add("v100", {"name": name, **writes}, {"batch_size": 64, "kv_tokens": 1024, "steps": QUICK_STEPS})
    return {"policy": {"name": "by hand"}, "gpus": gpus, "gpulets": gpulets, "models": models}


@contextlib.contextmanager
def served(writers: Sequence[str] = ()) -> Iterator[Server]:
    """Start `tenuto serve` on free ports of the loopback interface; it ends with the context.

    Raises:
        UnavailableError: it did not become ready; with the end of what it printed.
    """
    from tenuto.deployments.serve.launcher import unused_port

    with tempfile.TemporaryDirectory(prefix="tenuto-suite-") as name:
        folder = Path(name)
        make_tokenizer(folder / "tokenizer")
        (folder / "plan.yaml").write_text(json.dumps(plan(folder / "tokenizer", writers)), "utf-8")
        # The gateway's port is one of four: Serve's proxies and the operator's have the next two.
        server = Server(unused_port(), unused_port(), unused_port(), folder / "tokenizer")
        ports = {"port": server.http_port, "grpc-port": server.grpc_port, "operator-port": server.operator_port}
        words = [f"--{port}={number}" for port, number in {**ports, "proxy-port": unused_port()}.items()]
        path = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(
                [
                    sys.executable,
                    "-c",
                    "from tenuto.cli import main; main()",
                    "serve",
                    "plan.yaml",
                    "--address=local",
                    *words,
                ],
                cwd=folder,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONPATH": path},
            )
        try:
            _wait_until_ready(process, server, folder / "log")
            yield server
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(ENDS_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_until_ready(process: subprocess.Popen[bytes], server: Server, log: Path) -> None:
    until = time.monotonic() + STARTS_S
    while time.monotonic() < until and process.poll() is None:
        if b"serving at" in log.read_bytes():
            with contextlib.suppress(OSError):
                get(f"{server.url}/v2/health/ready")
                return
        time.sleep(0.3)
    said = "\n".join(log.read_text("utf-8", "replace").splitlines()[-15:])
    raise UnavailableError(f"tenuto serve did not become ready:\n{said}")
