"""Builds a network: from the catalogue with random or local weights, from a local directory, or by a user's factory.

Nothing is downloaded and nothing is unpickled. torch, torchvision and transformers are imported when a model is built.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tenuto.documents import parse_document
from tenuto.errors import EnvironmentFaultError, TenutoError, first_line, refused
from tenuto.profiles.networks.catalogue import (
    LABEL_COUNT,
    CatalogueEntry,
    LoadedModel,
    ModelSignature,
    TextInput,
    is_exported,
    is_factory,
    lookup,
    refuse_foreign_file,
    text_signature,
    with_sizes,
)
from tenuto.profiles.networks.encoder_files import is_encoder, read_encoder
from tenuto.profiles.networks.exported import describe_exported, load_exported
from tenuto.profiles.networks.generating import longest_sequence
from tenuto.profiles.networks.import_factory import check_path, imported
from tenuto.profiles.networks.model_options import BuildOptions, ShapeOptions
from tenuto.profiles.networks.tokenizer_files import tokenizer_file, tokenizer_place

if TYPE_CHECKING:
    import torch


def build(
    source: str, *, weights_path: str | None = None, seed: int = 0, options: Mapping[str, Any] | None = None
) -> LoadedModel:
    """Return a network in evaluation mode, on the CPU, with its signature.

    Args:
        source: a catalogue name or source, `package.module:factory`, a local transformers directory, or a `.pt2` or
            `.onnx` file.
        weights_path: local `.safetensors` or state dict, or a transformers directory; without it weights are random.
        seed: seed of the random weights; the same seed gives the same weights.
        options: see `BuildOptions`; for a file, `ShapeOptions`; for a factory, its keyword arguments.

    Raises:
        InvalidInputError: unknown model, wrong options, weights that are unsafe to read or do not fit, or a place that
            is not allowed (`tenuto.profiles.networks.import_factory`).
        EnvironmentFaultError: torch, torchvision or transformers is not installed.
    """
    options = dict(options or {})
    if weights_path is not None:
        check_path(weights_path, "weights_path")
    try:
        if is_factory(source):
            return _from_factory(source, weights_path, options)
        if is_exported(source):
            return load_exported(source, _shape_options(source, weights_path, options))
        chosen = parse_document(BuildOptions, {"seed": seed, **options}, origin=f"options of {source}")
        if Path(source).is_dir():
            check_path(source, "source")
            return _from_directory(Path(source), weights_path, chosen)
        entry = lookup(source)
        family = entry.source.partition("/")[0]
        if weights_path is not None and Path(weights_path).is_dir():
            if family != "transformers":
                raise refused("weights_path", weights_path, "is a directory", "Give the file with the weights.")
            return _from_directory(Path(weights_path), None, chosen, expected=entry.name.partition("_")[0])
        return (
            _image_model(entry, weights_path, chosen)
            if family != "transformers"
            else _text_model(entry, weights_path, chosen)
        )
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in ("torch", "torchvision", "transformers"):
            raise
        raise EnvironmentFaultError(
            f"'{source}' needs the package '{error.name}'. Run: pip install 'tenuto[serve]'"
        ) from error


def describe(
    source: str, *, weights_path: str | None = None, options: Mapping[str, Any] | None = None
) -> ModelSignature | None:
    """Return what the file or folder of a network says without building it; None where only building it tells. An ONNX
    file and a sentence encoder need no torch. Raises as `build`."""
    refuse_foreign_file(source)
    if is_exported(source):
        return describe_exported(source, _shape_options(source, weights_path, options or {}))
    if is_encoder(Path(source)):
        check_path(source, "source")
        given = parse_document(BuildOptions, dict(options or {}), origin=f"options of {source}")
        return read_encoder(Path(source), given).signature
    return None


def _image_model(entry: CatalogueEntry, weights_path: str | None, options: BuildOptions) -> LoadedModel:
    from tenuto.profiles.networks.torchvision_import import imagenet_categories, import_torchvision
    from tenuto.profiles.networks.vision_networks import lenet

    if entry.signature.answers == "boxes":
        return _detector(entry, weights_path, options)
    classes = options.num_labels or int(options.config.get("num_classes", entry.signature.outputs[0].shape[0]))
    config = {**entry.config, **options.config, "num_classes": classes}
    if entry.name == "lenet":
        module = _seeded(lambda: lenet(**config), entry.name, config, options.seed)
    else:
        create = getattr(import_torchvision().models, entry.name)
        module = _seeded(lambda: create(weights=None, **config), entry.name, config, options.seed)
    if weights_path is None:
        _calibrate(module, options.image_size or entry.signature.inputs[0].fixed_shape[-1], options.seed)
    else:
        _load_weights(module, weights_path, entry.name)
    labels = options.labels or (imagenet_categories() if classes == 1000 else ())
    return _loaded(module, _sized(entry.signature, classes, options), labels)


def _detector(entry: CatalogueEntry, weights_path: str | None, options: BuildOptions) -> LoadedModel:
    from tenuto.profiles.networks.torchvision_import import categories
    from tenuto.profiles.networks.vision_networks import Detector, make_detector

    names = categories("_COCO_CATEGORIES")
    config = {"num_classes": options.num_labels or len(names), **entry.config, **options.config}
    network = _seeded(lambda: make_detector(entry.name, config), entry.name, config, options.seed)
    (most, _) = entry.signature.outputs[0].fixed_shape
    detector = Detector(network, most).eval()
    signature = with_sizes(entry.signature, image_size=options.image_size)
    if weights_path is None:
        _calibrate(network.backbone, signature.inputs[0].fixed_shape[-1], options.seed)
    else:
        _load_weights(network, weights_path, entry.name)
    labels = options.labels or (names if config["num_classes"] == len(names) else ())
    detector.requires_grad_(False)
    return LoadedModel(detector, replace(signature, labels=labels))


def _text_model(entry: CatalogueEntry, weights_path: str | None, options: BuildOptions) -> LoadedModel:
    from tenuto.profiles.networks.text_networks import classify, make_text_network

    classes = options.num_labels or int(options.config.get("num_labels", LABEL_COUNT))
    config = {**entry.config, **options.config, "num_labels": classes}
    network = _seeded(lambda: make_text_network(entry.name, config), entry.name, config, options.seed)
    if weights_path is not None:
        _load_weights(network, weights_path, entry.name)
    text = entry.signature.text
    if text is not None:
        vocabulary = int(network.config.vocab_size)
        if vocabulary != text.vocabulary_size:
            text = _smaller_vocabulary(text, vocabulary)
        _check_length(network.config, options.sequence_length or text.sequence_length, entry.name)
        text = replace(text, tokenizer_path=_tokenizer(options.tokenizer), truncate=options.truncate is not False)
    signature = replace(entry.signature, text=text)
    labels = options.labels or tuple(f"LABEL_{index}" for index in range(classes))
    return _loaded(classify(network), _sized(signature, classes, options), labels)


def _from_directory(
    directory: Path, weights_path: str | None, options: BuildOptions, expected: str | None = None
) -> LoadedModel:
    """Load a local transformers sequence classifier, with its `tokenizer.json` if there is one, or a sentence
    encoder."""
    from tenuto.profiles.networks.text_networks import classify, load_directory, load_encoder

    if weights_path is not None or options.config:
        raise refused(
            "model",
            str(directory),
            "a directory brings its own weights and configuration",
            "Remove `weights_path` and `options.config`.",
        )
    if expected is None and is_encoder(directory):
        files = read_encoder(directory, options)
        return _loaded(load_encoder(files), files.signature, ())
    network = load_directory(directory, expected)
    config = network.config
    classes = int(config.num_labels)
    # Default: tokens, where neither options nor the network say. Texts of a ranker are not padded to them.
    length = options.sequence_length or min(128 if classes > 1 else 512, longest_sequence(config) or 128)
    _check_length(config, length, str(directory))
    pad_id = config.pad_token_id
    if pad_id is None:
        pad_id = config.pad_token_id = config.eos_token_id or 0
    text = TextInput(
        sequence_length=length,
        vocabulary_size=int(config.vocab_size),
        pad_id=int(pad_id),
        padding_side="left" if config.model_type == "xlnet" else "right",
        tokenizer_path=_tokenizer(tokenizer_place(options.tokenizer, str(directory))),
    )
    labels = options.labels or tuple(str(config.id2label.get(i, f"LABEL_{i}")) for i in range(classes))
    if classes == 1:
        return _loaded(classify(network), _ranker(text, config, options), labels)
    text = replace(text, truncate=options.truncate is not False)
    return _loaded(classify(network), text_signature(text, classes), labels)


def _ranker(text: TextInput, config: Any, options: BuildOptions) -> ModelSignature:
    """Return the signature of a cross-encoder, a classifier with one label. Its configuration may name what makes the
    score of its logit, as sentence-transformers has it; otherwise the logistic function does."""
    named = (getattr(config, "sentence_transformers", None) or {}).get("activation_fn")
    named = named or getattr(config, "sbert_ce_default_activation_function", None) or "Sigmoid"
    activation = str(named).rpartition(".")[2]
    if activation not in ("Identity", "Sigmoid"):
        raise refused("model", named, "is no activation that is known here", "Use Identity or Sigmoid.")
    has_types = (getattr(config, "type_vocab_size", None) or 0) > 1
    is_sized = options.sequence_length is None and text.padding_side == "right"
    text = replace(text, truncate=bool(options.truncate))
    signature = text_signature(text, 1, has_pairs=has_types, is_sized=is_sized)
    return replace(signature, answers="logit" if activation == "Sigmoid" else "score")


def _shape_options(source: str, weights_path: str | None, options: Mapping[str, Any]) -> ShapeOptions:
    """Return the options of an exported network, which brings its own weights."""
    other = sorted(options.keys() - ShapeOptions.model_fields) + ["weights_path"] * (weights_path is not None)
    if other:
        rule = f"an exported network takes no {', '.join(other)}"
        cure = f"Remove them; only {', '.join(ShapeOptions.model_fields)} and options of how it is run apply."
        raise refused("model", source, rule, cure)
    return parse_document(ShapeOptions, dict(options), origin=f"options of {source}")


def _from_factory(source: str, weights_path: str | None, options: dict[str, Any]) -> LoadedModel:
    """Call a user's factory with the model's options, and `weights_path` when one is given."""
    target = imported(source, "model")
    arguments = options if weights_path is None else {**options, "weights_path": weights_path}
    try:
        made = target(**arguments)
    except TypeError as error:
        raise refused(
            "model",
            source,
            f"cannot be called with the options {sorted(arguments)} ({error})",
            "The factory takes the model's `options`, and `weights_path` if given, as keyword arguments.",
        ) from error
    except TenutoError:
        raise
    except Exception as error:
        rule = f"the factory raised {type(error).__name__} ({first_line(error)})"
        raise refused("model", source, rule, "Correct it; TENUTO_DEBUG=1 shows where it failed.") from error
    if not isinstance(made, LoadedModel) or not isinstance(made.signature, ModelSignature):
        raise refused(
            "model",
            source,
            f"the factory returned {type(made).__name__}",
            "Return tenuto.profiles.networks.catalogue.LoadedModel(module, signature).",
        )
    made.module.eval().requires_grad_(False)
    return made


def _seeded(create: Any, name: str, config: Mapping[str, Any], seed: int) -> Any:
    """Create a network with weights drawn from `seed`. The caller's random state does not change."""
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            return create()
        except (TypeError, ValueError, RuntimeError) as error:
            raise refused(
                f"options of {name}",
                dict(config),
                f"no such network can be built ({error})",
                "Correct `config`; its keys are the arguments of the network's own constructor.",
            ) from error


def _calibrate(module: Any, size_px: int, seed: int) -> None:
    """Set the statistics of batch normalisation from one batch of seeded pictures, much as training would.

    Without this, the activations of random weights vanish or explode with depth (1e-15 in EfficientNet, 1e12 in
    Inception). Then labels would depend on rounding errors, and denormal numbers would slow a CPU down as no trained
    network does. The mean stays zero, because centring would amplify the small differences that are left deep in a
    random network. EfficientNet-B7, which is 55 blocks deep, still magnifies rounding errors on photographs.
    """
    import torch
    from torch._subclasses.fake_tensor import FakeTensor

    layers = [layer for layer in module.modules() if isinstance(layer, torch.nn.BatchNorm2d)]
    if not layers or isinstance(layers[0].running_var, FakeTensor):  # a module that is only traced has no values
        return

    def normalise(layer: Any, inputs: tuple[torch.Tensor, ...]) -> None:
        layer.running_mean.zero_()
        layer.running_var.copy_(inputs[0].square().mean(dim=(0, 2, 3)).clamp(min=1e-12))

    module.eval()
    hooks = [layer.register_forward_pre_hook(normalise) for layer in layers]
    with torch.inference_mode():
        module(_pictures(size_px, seed))
    for hook in hooks:
        hook.remove()


def _pictures(size_px: int, seed: int) -> torch.Tensor:
    """Return a batch of pictures: one half is white noise, the other half is smooth at all scales, as photographs
    are."""
    import torch
    from torch.nn.functional import interpolate

    generator = torch.Generator().manual_seed(seed)
    half = max(1, min(8, round(2 * (128 / size_px) ** 2)))  # limit: pictures, and four times fewer of twice the size
    white = torch.randn(half, 3, size_px, size_px, generator=generator)
    smooth = torch.zeros_like(white)
    for cells in (2, 4, 8, 16, 32):
        noise = torch.randn(half, 3, cells, cells, generator=generator)
        smooth += interpolate(noise, size=(size_px, size_px), mode="bilinear")
    return torch.cat([white, smooth / 5**0.5])


def _loaded(module: Any, signature: ModelSignature, labels: tuple[str, ...]) -> LoadedModel:
    classes = signature.outputs[0].shape[0]
    if labels and len(labels) != classes:
        raise refused("options.labels", len(labels), f"the model has {classes} outputs", "Give one label for each.")
    module.eval().requires_grad_(False)
    return LoadedModel(module, replace(signature, labels=labels))


def _sized(signature: ModelSignature, classes: int, options: BuildOptions) -> ModelSignature:
    output = replace(signature.outputs[0], shape=(classes,))
    length = None if signature.text is None else options.sequence_length or signature.text.sequence_length
    sized = replace(signature, outputs=(output,))
    return with_sizes(sized, image_size=options.image_size, sequence_length=length)


def _smaller_vocabulary(text: TextInput, vocabulary: int) -> TextInput:
    """Keep special identifiers inside a vocabulary whose size `config` changed."""
    inside = max(0, vocabulary - 1)
    return replace(
        text,
        vocabulary_size=vocabulary,
        pad_id=min(text.pad_id, inside),
        first_word_id=min(text.first_word_id, inside // 2),
        prefix=tuple(min(i, inside) for i in text.prefix),
        suffix=tuple(min(i, inside) for i in text.suffix),
    )


def _check_length(config: Any, length: int, name: str) -> None:
    limit = getattr(config, "max_position_embeddings", None)
    if limit is not None and config.model_type not in ("bloom", "t5", "xlnet") and length > limit:
        raise refused(
            f"options of {name}",
            length,
            f"'sequence_length' is above the network's {limit} positions",
            f"Give at most {limit}.",
        )


def _tokenizer(path: str | None) -> str | None:
    if path is None:
        return None
    file = tokenizer_file(path)
    if not file.exists():
        raise refused(
            "options.tokenizer", path, "no such file", "Give a local tokenizer.json of the tokenizers library."
        )
    return str(file.resolve())


def _load_weights(module: torch.nn.Module, path: str, name: str) -> None:
    from tenuto.profiles.networks.weights import apply_state, read_state

    apply_state(module, read_state(path), path, name)
