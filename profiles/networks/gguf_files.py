"""Unpacks a `.gguf` file, whose weights are packed in a few bits each, into a folder of transformers that is served."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from tenuto.errors import EnvironmentFaultError, first_line, refused
from tenuto.profiles.networks.import_factory import check_path

_NEEDS = ("gguf", "accelerate")  # what transformers reads such files with


def unpack_gguf(file: str, folder: str) -> None:
    """Write the network and the tokenizer of a file into a folder, in float32: about six times as large.

    Raises:
        InvalidInputError: there is no such file, or transformers does not know what is in it.
        EnvironmentFaultError: a package is not installed.
    """
    check_path(file, "model")
    path = Path(file).resolve()
    if not path.is_file():
        raise refused("model", file, "no such file", "Give a local .gguf file.")
    missing = [name for name in _NEEDS if importlib.util.find_spec(name) is None]
    if missing:
        raise EnvironmentFaultError(
            f"to read {file}, transformers needs {' and '.join(missing)}. Run: pip install {' '.join(missing)}"
        )
    import transformers

    from tenuto.profiles.networks.text_networks import prepare_transformers

    prepare_transformers()
    where = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name, "local_files_only": True}
    try:
        plain = transformers.GgufConfig(dequantize=True)
        network = transformers.AutoModelForCausalLM.from_pretrained(**where, quantization_config=plain)
        tokenizer = transformers.AutoTokenizer.from_pretrained(**where)
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        rule = f"cannot be unpacked by transformers ({first_line(error)})"
        raise refused("model", file, rule, "Give the folder with the model's original weights.") from error
    network.hf_quantizer = None  # of weights that are plain by now; transformers would refuse to save them
    network.config.__dict__.pop("quantization_config", None)
    network.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
