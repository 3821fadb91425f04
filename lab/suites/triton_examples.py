"""Triton's Python examples: each is a client that checks its answers itself and ends with 0.

They come from a checkout of github.com/triton-inference-server/client (src/python/examples) and run unchanged, but for
the name that two of them want the server to have.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path

from environments import UnavailableError, python_environment, run
from served import Server
from verdicts import Case, last_line, run_suite

SOURCES = "github.com/triton-inference-server/client"
VERSION = "2.73.0"
SHARED_MEMORY = "the shared memory extensions are not offered: clients send tensors in the body"
# What is not offered, by a part of the example's name.
LEFT_OUT = {
    "shm": SHARED_MEMORY,
    "reuse_infer_objects": SHARED_MEMORY,
    "sequence": "models with a state between requests are not served",
    "custom_repeat": "a model that answers a request several times is not served, but for those that generate",
    "model_control": "the repository is not the clients': plans say what runs",
    "ensemble": "asks for an ensemble of Triton's example repository",
    "memory_growth": "takes hours",
}


def prepare(arguments: argparse.Namespace, folder: Path):
    """Return the client's version and a case for each example."""
    if arguments.checkout is None:
        raise UnavailableError(f"the examples are in no package. Give --checkout DIR, a checkout of {SOURCES}.")
    examples = arguments.checkout.resolve() / "src/python/examples"
    # setuptools: tritonclient's own stubs and the examples of pictures import packages that know no newer one
    programs = python_environment(folder, f"tritonclient[http,grpc]=={VERSION}", "attrdict", "pillow", "setuptools<81")

    def example(server: Server, script: Path, *words: str) -> Case:
        name = " ".join((script.stem, *(word for word in words if not word.startswith("/"))))
        reason = next((why for part, why in LEFT_OUT.items() if part in script.stem), None)
        if reason is not None:
            return Case(name, "skipped", reason)
        source = script.read_text("utf-8")
        if '"name"] == "triton"' in source or '.name == "triton"' in source:
            script = folder / script.name
            script.write_text(source.replace('== "triton"', '== "tenuto"'), "utf-8")
            name += ", with the name tenuto"
        is_grpc = "grpc" in words or ("grpc" in script.stem and "http" not in words)
        url = server.grpc if is_grpc else server.url.removeprefix("http://")
        done = run([programs / "python", script, "-u", url, *words], timeout_s=60.0)
        return Case(name, "failed", last_line(done.stdout)) if done.returncode else Case(name, "passed")

    def cases(server: Server) -> Iterable[Case]:
        picture = folder / "picture.png"
        draw = f"from PIL import Image; Image.effect_noise((320, 240), 80).convert('RGB').save({str(picture)!r})"
        run([programs / "python", "-c", draw])
        for script in sorted(examples.glob("*.py")):
            if script.stem in ("image_client", "grpc_image_client"):
                words = ("-m", "densenet_onnx", "-c", "3", "-s", "INCEPTION", str(picture))
                yield example(server, script, *words)
                yield example(server, script, "-b", "2", *words)
                if script.stem == "image_client":
                    yield example(server, script, "-i", "grpc", *words)
                    yield example(server, script, "-i", "grpc", "--streaming", *words)
                    yield example(server, script, "-a", *words)
            else:
                yield example(server, script)

    return VERSION, cases


def main() -> int:
    """Run it."""
    return run_suite("triton_examples", __doc__, prepare, checkout=SOURCES)


if __name__ == "__main__":
    sys.exit(main())
