"""Detectors of torchvision with one tensor in and boxes out, in the network's pixels and in those of the picture."""

import io
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from tenuto.errors import InvalidInputError
from tenuto.profiles.networks.catalogue import CATALOGUE, LoadedModel, ModelSignature
from tenuto.profiles.networks.model_options import RunOptions
from tenuto.profiles.networks.models import build
from tenuto.profiles.networks.network import LoneModel
from tenuto.profiles.networks.preprocess import postprocess, preprocess
from tenuto.profiles.networks.torchvision_import import import_detection

SMALL: dict[str, dict[str, Any]] = {
    "ssdlite320_mobilenet_v3_large": {"config": {"topk_candidates": 20, "detections_per_img": 50}},
    "fasterrcnn_resnet50_fpn": {
        "image_size": 64,
        "config": {"rpn_pre_nms_top_n_test": 40, "rpn_post_nms_top_n_test": 10, "box_score_thresh": 0.0},
    },
}


def picture(width: int, height: int) -> bytes:
    buffer = io.BytesIO()
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


@pytest.fixture(scope="module", params=sorted(SMALL))
def detector(request: pytest.FixtureRequest) -> LoadedModel:
    return build(request.param, options=SMALL[request.param])


def found(detector: LoadedModel, images: torch.Tensor) -> list[dict[str, np.ndarray[Any, Any]]]:
    """Return the boxes of each picture, without the rows behind the last."""
    with torch.inference_mode():
        outputs = detector.module(images)
    rows = [dict(zip(("boxes", "labels", "scores"), row, strict=True)) for row in zip(*outputs, strict=True)]
    counts = [int((row["scores"] > 0).sum()) for row in rows]
    assert all(not row["scores"][count:].any() for row, count in zip(rows, counts, strict=True))
    return [{k: v[:count].numpy() for k, v in row.items()} for row, count in zip(rows, counts, strict=True)]


def test_a_detector_finds_what_torchvision_finds(detector: LoadedModel) -> None:
    image = detector.signature.image
    assert image is not None
    edge = image.crop_px
    raw = torch.rand(2, 3, edge, edge, generator=torch.Generator().manual_seed(1))
    mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in (image.mean, image.std))
    network: Any = detector.module.network
    network.transform.min_size, network.transform.max_size = (edge,), edge  # so that nothing is resized
    ours = found(detector, (raw - mean) / std)
    with torch.inference_mode():
        theirs = network(list(raw))
    for mine, their in zip(ours, theirs, strict=True):
        assert len(mine["scores"]) == len(their["scores"]) > 0
        np.testing.assert_allclose(mine["scores"], their["scores"], atol=1e-4)
        assert (mine["scores"][:-1] >= mine["scores"][1:]).all()
        best = slice(0, 5)
        np.testing.assert_allclose(mine["boxes"][best], their["boxes"][best], atol=0.05)
        assert mine["labels"][best].tolist() == their["labels"][best].tolist()


def test_a_row_does_not_depend_on_the_batch_around_it(detector: LoadedModel) -> None:
    images = torch.randn(3, *detector.signature.inputs[0].fixed_shape, generator=torch.Generator().manual_seed(2))
    for together, image in zip(found(detector, images), images, strict=True):
        (alone,) = found(detector, image[None])
        assert len(alone["scores"]) == len(together["scores"])
        np.testing.assert_allclose(alone["scores"], together["scores"], atol=1e-4)


corner = st.integers(0, 9)


@given(st.lists(st.tuples(corner, corner, st.integers(1, 9), st.integers(1, 9), st.integers(0, 1)), max_size=9))
@settings(deadline=None)
def test_overlapping_boxes_of_a_class_are_suppressed_by_better_ones(
    drawn: list[tuple[int, int, int, int, int]],
) -> None:
    import_detection()
    from torchvision.ops.boxes import batched_nms

    boxes = torch.tensor([[x, y, x + w, y + h] for x, y, w, h, _ in drawn], dtype=torch.float32).reshape(-1, 4)
    classes = torch.tensor([each[4] for each in drawn], dtype=torch.int64)
    scores = 1.0 - torch.arange(len(drawn)) / 10.0
    expected: list[int] = []
    for at, (x, y, w, h, kind) in enumerate(drawn):
        cells = {(x + i, y + j) for i in range(w) for j in range(h)}
        kept = [drawn[k] for k in expected if drawn[k][4] == kind]
        others = [{(a + i, b + j) for i in range(c) for j in range(d)} for a, b, c, d, _ in kept]
        if all(len(cells & other) <= 0.45 * len(cells | other) for other in others):
            expected.append(at)
    assert batched_nms(boxes, scores, classes, 0.45).tolist() == expected


def boxed(signature: ModelSignature, body: bytes, *boxes: list[float]) -> list[list[float]]:
    (most, _) = signature.outputs[0].fixed_shape
    padded, scores = np.zeros((most, 4), np.float32), np.zeros(most, np.float32)
    padded[: len(boxes)], scores[: len(boxes)] = np.reshape(boxes, (-1, 4)), 0.5
    outputs = {"boxes": padded, "labels": np.full(most, 1), "scores": scores}
    return [each["box"] for each in postprocess(signature, outputs, body)]


def test_boxes_are_in_the_coordinates_of_the_clients_picture() -> None:
    stretched, padded = (CATALOGUE[name].signature for name in ("ssd300_vgg16", "fasterrcnn_resnet50_fpn"))
    body = picture(600, 150)
    assert boxed(stretched, body, [30, 60, 150, 300]) == [[60.0, 30.0, 300.0, 150.0]]
    assert boxed(padded, body, [80, 40, 800, 200]) == [[60.0, 30.0, 600.0, 150.0]]
    assert boxed(padded, body, [0, 100, 800, 400], [0, 300, 400, 400]) == [[0.0, 75.0, 600.0, 150.0]]  # not beside it
    assert boxed(stretched, body) == []
    for signature in (stretched, padded):
        assert boxed(signature, picture(1, 1), [0, 0, 300, 300])[0][:2] == [0.0, 0.0]


def test_a_whole_picture_is_stretched_or_padded_with_the_mean() -> None:
    signature = CATALOGUE["fasterrcnn_resnet50_fpn"].signature
    tensor = preprocess(signature, picture(400, 100))["image"]
    assert tensor.shape == (3, 800, 800)
    assert np.abs(tensor[:, 200:]).max() < 0.01 < np.abs(tensor[:, :200]).mean()
    assert preprocess(CATALOGUE["ssd300_vgg16"].signature, picture(20_000, 1))["image"].shape == (3, 300, 300)
    with pytest.raises(InvalidInputError, match="more than 50 million pixels as 5120000x256"):
        preprocess(CATALOGUE["resnet50"].signature, picture(20_000, 1))


def test_a_detector_runs_in_fp32_and_refuses_what_it_cannot_do(detector: LoadedModel) -> None:
    device = torch.device("cpu")
    network = LoneModel("d", detector, device, RunOptions(dtype="bf16").chosen(None))
    assert {parameter.dtype for parameter in network.module.parameters()} == {torch.float32}
    with pytest.raises(InvalidInputError, match="boxes as outputs"):
        LoneModel("d", detector, device, RunOptions(compile=True).chosen(None))


def test_lenet_reads_the_grey_of_a_picture() -> None:
    model = build("lenet", options={"num_labels": 3})
    assert (model.signature.inputs[0].shape, model.signature.outputs[0].shape) == ((3, 32, 32), (3,))
    grey = torch.rand(2, 1, 32, 32)
    colours = torch.cat([grey * 0.5, grey, grey * 1.5], dim=1)
    torch.testing.assert_close(model.module(colours), model.module(grey.expand(-1, 3, -1, -1)))
    assert sum(parameter.numel() for parameter in build("lenet").module.parameters()) == 61_706  # as published


@pytest.mark.parametrize("name", ["googlenet", "shufflenet_v2_x1_0", "squeezenet1_1"])
def test_further_classifiers_are_built(name: str) -> None:
    model = build(name, options={"image_size": 64})
    with torch.inference_mode():
        assert model.module(torch.randn(2, 3, 64, 64)).shape == (2, 1000)
