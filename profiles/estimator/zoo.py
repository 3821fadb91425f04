"""Networks of published zoos that are in torchvision but not in the catalogue: for tracing, never for serving.

Symphony's zoo (its appendix C) names Keras networks and prints a line l(b) = alpha*b + beta for each. Two dozen of them
have the same architecture in torchvision; sizes are Keras' defaults. The others (NASNet, Xception, ResNet V2, …) have
no counterpart there and are not used.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tenuto.profiles.networks.catalogue import ImageInput, LoadedModel, image_signature

__all__ = ["SYMPHONY_NETWORKS", "torchvision_network"]

_FACTORY = "tenuto.profiles.estimator.zoo:torchvision_network"

_EFFICIENTNET_SIZES = (224, 240, 260, 300, 380, 456, 528, 600)

_NAMES: dict[str, tuple[str, int]] = {
    "DenseNet121": ("densenet121", 224), "DenseNet169": ("densenet169", 224), "DenseNet201": ("densenet201", 224),
    "EfficientNetV2S": ("efficientnet_v2_s", 384), "EfficientNetV2M": ("efficientnet_v2_m", 480),
    "EfficientNetV2L": ("efficientnet_v2_l", 480), "InceptionV3": ("inception_v3", 299),
    "MobileNetV2": ("mobilenet_v2", 224), "MobileNetV3Large": ("mobilenet_v3_large", 224),
    "MobileNetV3Small": ("mobilenet_v3_small", 224), "ResNet101": ("resnet101", 224), "ResNet152": ("resnet152", 224),
    "ResNet50": ("resnet50", 224), "VGG16": ("vgg16", 224), "VGG19": ("vgg19", 224),
    **{f"EfficientNetB{n}": (f"efficientnet_b{n}", size) for n, size in enumerate(_EFFICIENTNET_SIZES)},
}  # fmt: skip

SYMPHONY_NETWORKS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    row: (_FACTORY, {"name": name, "image_size": size}) for row, (name, size) in _NAMES.items()
}


def torchvision_network(*, name: str, image_size: int) -> LoadedModel:
    """Return a torchvision classifier with random weights.

    Args:
        name: as torchvision calls it.
        image_size: height and width in pixels.
    """
    from tenuto.profiles.networks.torchvision_import import import_torchvision

    extra = {"init_weights": False} if name.startswith(("inception", "vgg")) else {}
    module = getattr(import_torchvision().models, name)(weights=None, **extra)
    return LoadedModel(module.eval(), image_signature(ImageInput(image_size, image_size), 1000))
