"""A model repository of Triton Inference Server as a workload.

Each folder of a repository is a model: `config.pbtxt` describes it, and numbered folders hold its versions. ONNX files,
exported programs and TorchScript become models of the workload, ensembles become applications. Of everything else a
note says what would have to be done. The messages of `config.pbtxt` come with the package `tritonclient`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from tenuto.errors import EnvironmentFaultError, InvalidInputError, Problem, first_line, refused
from tenuto.files import read_text
from tenuto.placement.versions import split_name, versioned
from tenuto.placement.workload import Workload

CONFIG = "config.pbtxt"
_BACKENDS = {  # by `platform`, which older configurations give in place of `backend`
    "onnxruntime_onnx": "onnxruntime",
    "pytorch_libtorch": "pytorch",
    "tensorrt_plan": "tensorrt",
    "tensorflow_graphdef": "tensorflow",
    "tensorflow_savedmodel": "tensorflow",
    "ensemble": "ensemble",
}
_FILES = {  # by backend, the file of a version where the configuration names none
    "onnxruntime": "model.onnx",
    "pytorch": "model.pt",
    "tensorrt": "model.plan",
    "python": "model.py",
}
_CURES = {  # by backend, how a model that is not served becomes one that is
    "tensorrt": "an engine of TensorRT is not served: give the ONNX file it was built from, with `runtime: tensorrt`",
    "tensorflow": "TensorFlow is not served: convert it with tf2onnx",
    "openvino": "OpenVINO is not served: give the ONNX file it was made from",
    "python": "write its `execute` as a factory, `source: package.module:factory`, or as hooks of the model it calls",
    "vllm": "give the folder of its weights as `source`, with `generates` and `runtime: vllm`",
    "dali": "write the pipeline as hooks of the model behind it",
    "fil": "convert the trees with skl2onnx or hummingbird",
}


class ImportNote(NamedTuple):
    """What was not taken over as it is, and why. `is_left_out`: the model is not in the workload."""

    model: str
    text: str
    is_left_out: bool = False


@dataclass
class RepositoryImport:
    """The models and applications of a repository, as entries of a workload file."""

    models: list[dict[str, Any]] = field(default_factory=list)
    applications: list[dict[str, Any]] = field(default_factory=list)
    notes: list[ImportNote] = field(default_factory=list)

    def workload(self, origin: str) -> Workload:
        """Return the workload; raises `InvalidInputError` where nothing was taken over, or entries do not fit."""
        if not self.models and not self.applications:
            left_out = (Problem(f"{origin}/{r.model}", None, r.text, "") for r in self.notes)
            raise InvalidInputError([*left_out, f"{origin}: no model of it can be served as it is."])
        return Workload.of_document({"models": self.models, "applications": self.applications}, origin)


def read_repository(folder: str | Path, *, rate_rps: float, slo_ms: float) -> RepositoryImport:
    """Return what a repository holds.

    Args:
        folder: the repository.
        rate_rps: requests per second planned for each model and application; a repository does not say it.
        slo_ms: the time for an answer in ms, for models whose queue policy names no timeout.

    Raises:
        InvalidInputError: there is no such folder, it holds no model, or a configuration cannot be read.
        EnvironmentFaultError: `tritonclient` is not installed.
    """
    root = Path(folder)
    if not root.is_dir():
        raise refused("repository", str(folder), "is no folder", "Give a folder that has a folder for each model.")
    folders = [each for each in sorted(root.iterdir()) if (each / CONFIG).is_file() or _version_folders(each)]
    if not folders:
        cure = f"Give a folder that has a folder for each model, with {CONFIG} or numbered versions."
        raise refused("repository", str(folder), "holds no model", cure)
    imported = RepositoryImport()
    configs = {each.name: _read_config(each) for each in folders}
    for each in folders:
        _add_model(imported, each, configs[each.name], rate_rps, slo_ms)
    for name, config in configs.items():
        if _backend(config) == "ensemble":
            _add_ensemble(imported, name, config, rate_rps, slo_ms)
    return imported


def _read_config(folder: Path) -> Any:
    """Return the configuration of a model; an empty one where it has no file, as Triton completes it."""
    try:
        from google.protobuf import text_format
        from tritonclient.grpc.model_config_pb2 import ModelConfig
    except ImportError as error:
        cure = "Run: pip install 'tenuto[triton]'"
        raise EnvironmentFaultError(f"a repository of Triton needs the package 'tritonclient'. {cure}") from error
    file, config = folder / CONFIG, ModelConfig()
    if file.is_file():
        try:
            text_format.Parse(read_text(file), config)
        except text_format.ParseError as error:
            rule = f"is no configuration of a model ({first_line(error)})"
            raise refused(str(file), None, rule, "Correct it; Triton's message ModelConfig has the fields.") from None
    return config


def _backend(config: Any) -> str:
    backend = config.backend or _BACKENDS.get(config.platform, config.platform)
    if not backend and config.default_model_filename:
        return _backend_of_file(config.default_model_filename)
    return str(backend)


def _backend_of_file(name: str) -> str:
    suffixes = {".onnx": "onnxruntime", ".pt": "pytorch", ".pt2": "pytorch", ".plan": "tensorrt", ".py": "python"}
    return suffixes.get(Path(name).suffix, "")


def _version_folders(folder: Path) -> list[Path]:
    """Return the folders of versions, the lowest number first. Triton ignores names that begin with 0."""
    if not folder.is_dir():
        return []
    named = [each for each in folder.iterdir() if each.is_dir() and each.name.isdecimal() and each.name[0] != "0"]
    return sorted(named, key=lambda each: int(each.name))


def _served_versions(folder: Path, config: Any) -> list[Path]:
    """Return the versions that Triton's policy serves, the lowest first; by default only the highest."""
    versions, policy = _version_folders(folder), config.version_policy
    if policy.HasField("all"):
        return versions
    if policy.HasField("specific"):
        return [each for each in versions if int(each.name) in policy.specific.versions]
    return versions[-max(1, policy.latest.num_versions) :]


def _add_model(imported: RepositoryImport, folder: Path, config: Any, rate_rps: float, slo_ms: float) -> None:
    """Add a model with its versions, or note why it is left out."""
    name, backend = folder.name, _backend(config)
    if backend == "ensemble":
        return
    versions = _served_versions(folder, config)
    if not versions:
        imported.notes.append(ImportNote(name, "no version that its policy serves has a folder", is_left_out=True))
        return
    files = {version: _file_of(version, config, backend) for version in versions}
    reason = _why_left_out(config, backend, files)
    if reason is not None:
        imported.notes.append(ImportNote(name, reason, is_left_out=True))
        return
    options: dict[str, Any] = {}
    labels = _labels(imported, folder, config)
    if labels:
        options["labels"] = labels
    if any(each.name == "tensorrt" for each in config.optimization.execution_accelerators.gpu_execution_accelerator):
        options["runtime"] = "tensorrt"
    is_script = any(file.suffix == ".pt" for file in files.values())
    if config.input and config.output and (is_script or config.max_batch_size == 0):
        front = ["batch"] if config.max_batch_size > 0 else []
        tensors = (*sorted(config.input, key=_place), *sorted(config.output, key=_place))
        options["shapes"] = {each.name: front + _shape(each) for each in tensors}
        if is_script:
            options["types"] = {each.name: _dtype(each) for each in tensors}
    timeout_us = config.dynamic_batching.default_queue_policy.default_timeout_microseconds
    for version, file in files.items():
        entry: dict[str, Any] = {"name": versioned(name, version.name), "source": str(file), "rate_rps": rate_rps}
        entry["slo_ms"] = timeout_us / 1000.0 if timeout_us else slo_ms  # format: of microseconds
        if options:
            entry["options"] = options
        if version is not versions[-1]:
            entry["share_pct"] = 0.0  # clients that name no version are sent to the highest one, as by Triton
        imported.models.append(entry)
    imported.notes.extend(ImportNote(name, text) for text in _differences(config))


def _file_of(version: Path, config: Any, backend: str) -> Path:
    """Return the file of a version: the one that the configuration names, the backend's own, or the only one."""
    named = config.default_model_filename or _FILES.get(backend, "")
    file = (version / named).resolve() if named else version
    if not named or (not file.exists() and not config.default_model_filename):
        others = sorted(each for each in version.iterdir() if each.suffix in (".onnx", ".pt2", ".pt"))
        file = others[0].resolve() if others else file
    if file.is_dir():  # with external data, Triton takes a folder that holds the file
        file = file / "model.onnx"
    return file


def _why_left_out(config: Any, backend: str, files: Mapping[Path, Path]) -> str | None:
    """Return why a model cannot be served as it is, and the cure; None if it can."""
    if config.HasField("sequence_batching"):
        return (
            "it keeps the state of sequences on the server: give the states as inputs and outputs, which clients send"
        )
    if config.model_transaction_policy.decoupled:
        return "it answers one request many times: models that generate do so here (`generates`), others do not"
    optional = [each.name for each in config.input if each.optional]
    if optional:
        return f"its input '{optional[0]}' is optional: write a network that always takes it"
    for version, file in files.items():
        named = backend or _backend_of_file(file.name) or "unknown"
        if named not in ("onnxruntime", "pytorch") or file.suffix not in (".onnx", ".pt2", ".pt"):
            return _CURES.get(named, f"its backend '{named}' is not served: write the network as ONNX")
        if not file.is_file():
            return f"version {version.name} has no file {file.name}"
        if file.suffix == ".pt" and not (config.input and config.output):
            return "TorchScript names no shapes: give `input` and `output` in its config.pbtxt"
    return None


def _place(tensor: Any) -> int:
    """Return which argument of TorchScript a tensor is, as Triton writes it: INPUT__0. Others stay in their order."""
    place = tensor.name.rpartition("__")[2]
    return int(place) if place.isdecimal() else 0


def _dtype(tensor: Any) -> str:
    """Return numpy's name of a tensor's type: TYPE_FP32 is float32."""
    name = type(tensor).DESCRIPTOR.fields_by_name["data_type"].enum_type.values_by_number[tensor.data_type].name
    return str(name).removeprefix("TYPE_").lower().replace("fp", "float").replace("bf16", "bfloat16")


def _shape(tensor: Any) -> list[int | str]:
    """Return the shape of a tensor of a model without a batch, with a name for each dimension that varies."""
    return [size if size >= 0 else f"{tensor.name}_{axis}" for axis, size in enumerate(tensor.dims)]


def _labels(imported: RepositoryImport, folder: Path, config: Any) -> list[str]:
    """Return the names of the entries of the first output."""
    if not config.output or not config.output[0].label_filename:
        return []
    file = folder / str(config.output[0].label_filename)
    try:
        return read_text(file).splitlines()
    except InvalidInputError as error:
        imported.notes.append(ImportNote(folder.name, f"its labels cannot be read ({first_line(error)})"))
        return []


def _differences(config: Any) -> Iterable[str]:
    """Say what of a configuration that is taken over works in another way here."""
    if config.max_batch_size > 0:
        yield f"profile it with batch sizes up to its max_batch_size, {config.max_batch_size}"
    if any(size < 0 for each in config.input for size in each.dims):
        yield "its inputs vary in size: say in `options: {sizes: …}` how large they may be"
    reshaped = [each.name for each in (*config.input, *config.output) if each.HasField("reshape")]
    if reshaped:
        yield f"`reshape` of {', '.join(reshaped)}: clients send and get the network's own shape"
    if any(each.allow_ragged_batch for each in config.input):
        yield "`allow_ragged_batch`: requests of different sizes are padded, or run in groups of equal size"
    if config.response_cache.enable:
        yield "`response_cache`: answers are not cached"
    if config.dynamic_batching.priority_levels:
        yield "`priority_levels`: requests of one model have one level; `priority` orders models"
    if config.instance_group:
        yield "`instance_group`: the planner decides how many replicas run, and where"


def _add_ensemble(imported: RepositoryImport, name: str, config: Any, rate_rps: float, slo_ms: float) -> None:
    """Add an ensemble as an application, or note why it is left out."""
    steps: Sequence[Any] = config.ensemble_scheduling.step
    model_names = {split_name(entry["name"])[0]: entry["name"] for entry in imported.models}  # the highest version
    reason = next(
        filter(None, (_why_no_stage(step, model_names) for step in steps)), None if steps else "it has no steps"
    )
    if reason is not None:
        imported.notes.append(ImportNote(name, reason, is_left_out=True))
        return
    labels = _stage_names(steps)
    made_by = {
        tensor: f"{label}.{output}"
        for step, label in zip(steps, labels, strict=True)
        for output, tensor in step.output_map.items()
    }
    stages = []
    for step, label in zip(steps, labels, strict=True):
        stage: dict[str, Any] = {"model": model_names[step.model_name]}
        if label != stage["model"]:
            stage["name"] = label
        stage["inputs"] = {key: made_by.get(tensor, tensor) for key, tensor in sorted(step.input_map.items())}
        stages.append(stage)
    outputs = {each.name: made_by[each.name] for each in config.output if each.name in made_by}
    application = {"name": name, "rate_rps": rate_rps, "slo_ms": slo_ms, "stages": stages}
    imported.applications.append({**application, "outputs": outputs} if outputs else application)


def _why_no_stage(step: Any, model_names: Mapping[str, str]) -> str | None:
    """Return why a step of an ensemble cannot be a stage, which asks the highest version of a model; None if it can."""
    model, version = step.model_name, step.model_version
    if model not in model_names:
        return f"its step {model} is not served"
    highest = split_name(model_names[model])[1]
    if 0 < version != int(highest):
        cure = f"Give version {version} a folder of its own"
        return f"its step {model} names version {version}, and stages ask the highest, {highest}. {cure}"
    return None


def _stage_names(steps: Sequence[Any]) -> list[str]:
    """Return a name for each step: that of its model, with a number where a model comes twice."""
    seen: dict[str, int] = {}
    names = []
    for step in steps:
        count = seen[step.model_name] = seen.get(step.model_name, 0) + 1
        names.append(step.model_name if count == 1 else f"{step.model_name}-{count}")
    return names
