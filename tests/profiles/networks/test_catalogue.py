import msgspec
import pytest

from tenuto.errors import InvalidInputError
from tenuto.profiles.networks.catalogue import (
    CATALOGUE,
    ModelSignature,
    TensorSignature,
    is_factory,
    lookup,
    with_sizes,
)


def test_the_networks_of_the_papers_are_there() -> None:
    thesis = (
        "alexnet bert bloom_560 densenet121 efficientnet_b7 gpt2 inception_v3 mobilenet_v2 resnet50 resnext50_32x4d"
    )
    others = "densenet201 googlenet lenet resnet101 shufflenet_v2_x1_0 squeezenet1_1 vgg16"
    detectors = "fasterrcnn_resnet50_fpn ssd300_vgg16 ssdlite320_mobilenet_v3_large"
    assert sorted(CATALOGUE) == sorted(f"{thesis} t5 vgg19 xlnet {others} {detectors}".split())


@pytest.mark.parametrize("name", sorted(CATALOGUE))
def test_lookup_by_name_and_by_source_agree(name: str) -> None:
    entry = lookup(name)
    assert lookup(entry.source) is entry
    assert entry.source.endswith("/" + name)


@pytest.mark.parametrize("name", sorted(CATALOGUE))
def test_signatures_survive_the_way_between_processes(name: str) -> None:
    signature = lookup(name).signature
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(signature), type=ModelSignature) == signature


@pytest.mark.parametrize("name", ["resnet5O", "torchvision/bert", "transformers/nothing", "", "a/b/c"])
def test_unknown_models_list_the_known_ones(name: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        lookup(name)
    assert "mobilenet_v2" in str(caught.value)
    assert "package.module:factory" in str(caught.value)


def test_a_near_miss_is_suggested() -> None:
    with pytest.raises(InvalidInputError, match="Did you mean 'resnet50'"):
        lookup("resnet5O")


def test_image_signature_is_what_the_reference_transform_makes() -> None:
    image = CATALOGUE["inception_v3"].signature.image
    assert image is not None
    assert (image.resize_px, image.crop_px) == (342, 299)
    assert CATALOGUE["inception_v3"].signature.inputs == (TensorSignature("image", "float32", (3, 299, 299)),)


def test_text_inputs_are_bounded_by_the_vocabulary() -> None:
    ids, mask = CATALOGUE["gpt2"].signature.inputs
    assert (ids.below, mask.below) == (50_257, 2)


def test_with_sizes_changes_inputs_and_keeps_outputs_and_labels() -> None:
    smaller = with_sizes(CATALOGUE["resnet50"].signature, image_size=112)
    assert smaller.inputs[0].shape == (3, 112, 112)
    assert smaller.image is not None
    assert smaller.image.resize_px == 128
    assert smaller.outputs == CATALOGUE["resnet50"].signature.outputs
    longer = with_sizes(CATALOGUE["bert"].signature, sequence_length=512)
    assert {tensor.shape for tensor in longer.inputs} == {(512,)}
    assert longer.labels == ("LABEL_0", "LABEL_1")


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("pkg.module:make", True),
        ("module:Class.make", True),
        ("resnet50", False),
        ("torchvision/resnet50", False),
        ("./a:b", False),
        ("C:\\models", False),
    ],
)
def test_factories_are_recognised(source: str, expected: bool) -> None:
    assert is_factory(source) is expected
