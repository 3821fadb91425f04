"""A picture in, boxes out, in the coordinates of the picture that the client sent."""

from __future__ import annotations

import gzip
import io

import numpy as np
from PIL import Image

from tenuto.deployments.wire.tensors import Blocks
from tenuto.profiles.networks.catalogue import ImageInput, ModelSignature, detector_signature
from tests.deployments.entry.test_gateway import PLAN, Bench
from tests.instruments.fake_gpulet import FakeGpulet


class DetectorGpulet(FakeGpulet):
    """Finds one box: the lower right quarter."""

    def signatures(self) -> dict[str, ModelSignature]:
        return {"m": detector_signature(ImageInput(8, 8, fit="stretch"), 2)}

    def compute(self, model: str, blocks: Blocks) -> dict[str, np.ndarray]:
        rows = len(np.concatenate(blocks["image"]))
        outputs = {"boxes": [[4, 4, 8, 8], [0, 0, 0, 0]], "labels": [3, 0], "scores": [0.75, 0.0]}
        return {name: np.array([values] * rows, np.float32) for name, values in outputs.items()}


async def test_boxes_are_in_the_coordinates_of_the_clients_picture() -> None:
    bench = Bench()
    bench.gpulets["a"] = DetectorGpulet("a", ("m",))
    await bench.start(PLAN)
    picture = io.BytesIO()
    Image.new("RGB", (600, 100)).save(picture, "PNG")
    expected = [{"label": "class 3", "index": 3, "score": 0.75, "box": [300.0, 50.0, 600.0, 100.0]}]
    answer = await bench.client.post("/predict/m", content=picture.getvalue())
    assert answer.status_code == 200, answer.text
    assert answer.json()["prediction"] == expected
    packed = gzip.compress(picture.getvalue())
    answer = await bench.client.post("/predict/m", content=packed, headers={"Content-Encoding": "gzip"})
    assert answer.json()["prediction"] == expected
    assert (await bench.client.post("/predict/m", content=b"no picture")).status_code == 400
    await bench.close()
