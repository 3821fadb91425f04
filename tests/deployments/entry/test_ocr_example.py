"""The application `ocr` of examples/real behind a gateway: a picture in, the text of its lines out, as rapidocr reads.

Skipped until `examples/real/install` has run. The comparison also needs what rapidocr depends on.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tenuto.placement import Plan, Workload
from tenuto.profiles import LinearLatency
from tests.deployments.entry.test_bytes import Served
from tests.instruments.live import LONG_MS

EXAMPLE = Path(__file__).parents[3] / "examples" / "real"
PICTURE = EXAMPLE / "sign.png"
LINES = ["Tenuto holds a note", "for its full value", "Platform 9, 17:45"]

pytest.importorskip("onnxruntime")
pytestmark = pytest.mark.skipif(not (EXAMPLE / "networks").exists(), reason="examples/real/install has not run")


def plan() -> Plan:
    """The application with its two models on one CPU, in small batches that need no measuring."""
    work = Workload.load(EXAMPLE / "workload.yaml")
    names, latency = ("detect", "recognise"), {"alpha_ms": 1.0, "beta_ms": 9.0}
    changes = {"sizes": {}, "latency": LinearLatency(**latency), "slo_ms": LONG_MS}
    models = [
        work[name].model_copy(update={**changes, "source": str(EXAMPLE / str(work[name].source))}) for name in names
    ]
    replicas = [{"name": name, "batch_size": 2, "latency": latency, "latency_ms": 11.0} for name in names]
    application = work.applications[0].model_copy(update={"slo_ms": LONG_MS})
    return Plan.from_data(
        {
            "policy": {"name": "test"},
            "gpus": [{"id": "n0/0", "type": "cpu"}],
            "gpulets": [{"id": "n0/0/a", "gpu": "n0/0", "models": replicas}],
            "models": [model.model_dump(mode="json", exclude_none=True) for model in models],
            "applications": [application.model_dump(mode="json", exclude_none=True)],
        }
    )


@pytest.fixture
async def served(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Served]:
    monkeypatch.syspath_prepend(str(EXAMPLE))  # which the processes of functions get, too
    made = Served()
    await made.start(plan())
    yield made
    await made.close()


async def read(served: Served) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the application says of the picture, and the parameters of the answer."""
    answer = await served.client.post("/predict/ocr", content=PICTURE.read_bytes())
    assert answer.status_code == 200, answer.text
    return answer.json()["prediction"], answer.json()["parameters"]


async def test_the_text_of_a_picture_is_read(served: Served) -> None:
    prediction, parameters = await read(served)
    assert prediction["text"] == LINES
    assert min(prediction["sure"]) > 0.9
    assert parameters["recognise.requests"] == len(LINES)


async def test_a_body_that_is_no_picture_is_the_clients_fault(served: Served) -> None:
    answer = await served.client.post("/predict/ocr", content=b"no picture")
    assert (answer.status_code, "Send a PNG or a JPEG" in answer.text) == (400, True)


@pytest.fixture
def direct(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What rapidocr itself says of the picture, before anything is served."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(EXAMPLE / "packages")])
    rapidocr = pytest.importorskip("rapidocr", reason="what rapidocr depends on (opencv, shapely) is not installed")
    return rapidocr.RapidOCR(params={"Global.use_cls": False, "Global.log_level": "error"})(str(PICTURE))


async def test_it_reads_what_rapidocr_reads(direct: Any, served: Served) -> None:
    prediction, _ = await read(served)
    assert prediction["text"] == [*direct.txts]
    boxes = np.hstack((direct.boxes.min(axis=1), direct.boxes.max(axis=1)))
    assert np.abs(prediction["boxes"] - boxes).max() <= 5.0  # pixels
