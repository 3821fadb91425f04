"""Makes training samples of profile files: the network of a row, how it was measured, and its traces."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from tenuto.errors import InvalidInputError
from tenuto.profiles.networks.catalogue import CATALOGUE, ImageInput, LoadedModel, image_signature, is_factory
from tenuto.profiles.networks.model_options import ModelOptions
from tenuto.profiles.profile import ModelProfile, Profile
from tenuto_lab.estimator.estimator import CREQ_METRIC, Sample
from tenuto_lab.estimator.trace import Trace, trace_model

TraceAtBatch = Callable[[int], Trace]

# How shipped profiles were measured that do not say so themselves. The thesis' clients send pictures of 224 pixels to
# every vision model and 512 tokens to every language model. Its latencies agree: EfficientNet-B7 at 600 pixels and
# Inception at 299 would exceed the V100's arithmetic, and bert at 128 tokens would use a fifth of it.
_CONDITIONS: dict[str, dict[str, dict[str, Any]]] = {
    "thesis-v100": {
        "efficientnet_b7": {"image_size": 224},
        "inception_v3": {"image_size": 224},
        **{name: {"sequence_length": 512} for name, entry in CATALOGUE.items() if entry.signature.text is not None},
    }
}

_FACTORY = "tenuto_lab.estimator.training:torchvision_network"
_EFFICIENTNET_SIZES = (224, 240, 260, 300, 380, 456, 528, 600)

# Symphony's zoo (its appendix C) names Keras networks and prints a line l(b) = alpha*b + beta for each. Two dozen of
# them have the same architecture in torchvision, at Keras' default sizes. The others (NASNet, Xception, ResNet V2, …)
# have no counterpart there and are not used.
_NAMES: dict[str, tuple[str, int]] = {
    "DenseNet121": ("densenet121", 224),
    "DenseNet169": ("densenet169", 224),
    "DenseNet201": ("densenet201", 224),
    "EfficientNetV2S": ("efficientnet_v2_s", 384),
    "EfficientNetV2M": ("efficientnet_v2_m", 480),
    "EfficientNetV2L": ("efficientnet_v2_l", 480),
    "InceptionV3": ("inception_v3", 299),
    "MobileNetV2": ("mobilenet_v2", 224),
    "MobileNetV3Large": ("mobilenet_v3_large", 224),
    "MobileNetV3Small": ("mobilenet_v3_small", 224),
    "ResNet101": ("resnet101", 224),
    "ResNet152": ("resnet152", 224),
    "ResNet50": ("resnet50", 224),
    "VGG16": ("vgg16", 224),
    "VGG19": ("vgg19", 224),
    **{f"EfficientNetB{n}": (f"efficientnet_b{n}", size) for n, size in enumerate(_EFFICIENTNET_SIZES)},
}

_SYMPHONY_NETWORKS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    row: (_FACTORY, {"name": name, "image_size": size}) for row, (name, size) in _NAMES.items()
}

_LINE_BATCHES = (1, 8, 32)  # batches that are learnt from a row known as a line: three points separate launch and work


def source_of(profile: Profile, row: str) -> tuple[str, Mapping[str, Any]] | None:
    """Return source and options of a profile row; None if the row names no network that can be built."""
    model = profile.models[row]
    if row in _SYMPHONY_NETWORKS and profile.name.startswith("symphony-"):
        return _SYMPHONY_NETWORKS[row]
    options = model.options or _CONDITIONS.get(profile.name, {}).get(row, {})
    source = model.network or row
    if source.rpartition("/")[2] in CATALOGUE or is_factory(source) or os.path.isdir(source):
        return source, options
    return None


def is_same_network(one: str, other: str) -> bool:
    """Whether two rows name one network in the spellings of different zoos: `ResNet50` and `resnet50`."""
    first, second = ("".join(c for c in name.lower() if c.isalnum()) for name in (one, other))
    return first == second


def conditions(profiles: list[Profile], row: str) -> Mapping[str, Any]:
    """Return the options of a model in the profiles; empty if they give none."""
    for profile in profiles:
        if row in profile.models and (known := source_of(profile, row)) is not None:
            return known[1]
    return {}


def tracer(source: str, options: Mapping[str, Any]) -> TraceAtBatch:
    """Return a function that gives the trace at any batch size, from two traces made now.

    Batches of two and four: at one, networks may skip copies that every other size needs.
    """
    low, high = trace_model(source, (2, 4), ModelOptions.parse(options, f"options of {source}").build)
    return lambda batch_size: low.at_batch(high, batch_size)


def collect_samples(profiles: list[Profile], *, on_model: Callable[[str], None] = lambda _name: None) -> list[Sample]:
    """Return a sample for every measured whole-device point whose network can be traced; earlier profiles win.

    A row that is a line l(b) = alpha*b + beta gives its values at batches 1, 8 and 32.

    Args:
        profiles: of one GPU type.
        on_model: called with each model before it is traced.
    """
    samples: list[Sample] = []
    seen: set[str] = set()
    for profile in profiles:
        for row, model in profile.models.items():
            known = source_of(profile, row)
            if known is None or row in seen or not _whole(model):
                continue
            seen.add(row)
            on_model(row)
            try:
                at_batch = tracer(*known)
            except InvalidInputError:
                continue  # a row of a network that is not installed here any more
            if model.line is not None and not model.points:
                samples += [Sample(row, at_batch(b), model.latency_ms(b)) for b in _LINE_BATCHES]
            samples += [
                Sample(row, at_batch(p.batch_size), p.latency_ms, p.memory_mib, p.metrics.get(CREQ_METRIC))
                for p in model.points
                if p.share_pct == 100.0
            ]
    return samples


def _whole(model: ModelProfile) -> bool:
    return model.line is not None or any(point.share_pct == 100.0 for point in model.points)


def torchvision_network(*, name: str, image_size: int) -> LoadedModel:
    """Return a torchvision classifier with random weights: for tracing, never for serving.

    Args:
        name: as torchvision calls it.
        image_size: height and width in pixels.
    """
    from tenuto.profiles.networks.torchvision_import import import_torchvision

    extra = {"init_weights": False} if name.startswith(("inception", "vgg")) else {}
    module = getattr(import_torchvision().models, name)(weights=None, **extra)
    return LoadedModel(module.eval(), image_signature(ImageInput(image_size, image_size), 1000))
