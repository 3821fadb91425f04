"""The pages of files in docs/reference name every key of every file, and their examples are valid."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from pydantic import BaseModel

from tenuto.documents import parse_document
from tenuto.placement import Arrival, Cluster, GpuGroup, ModelSpec, Node, Plan, Workload
from tenuto.placement.application import Application, Stage
from tenuto.placement.plan import Expected, ExpectedModel, PlannedGpu, PolicyUsed
from tenuto.placement.program import Gpulet, MergedGroup, Replica
from tenuto.profiles import Fit, LatencyTable, LinearLatency, Measured, ModelProfile, Profile, ProfilePoint

PAGES = Path(__file__).parents[2] / "docs" / "reference"
SECTIONS = {
    **dict(
        zip(
            *[iter(re.split(r"^## (\w+)\n", (PAGES / "files.md").read_text(), flags=re.MULTILINE)[1:])] * 2, strict=True
        )
    ),
    "Profile": (PAGES / "profile-file.md").read_text(),
    "Plan": (PAGES / "plan-file.md").read_text(),
}
SCHEMAS: dict[str, tuple[type[BaseModel], ...]] = {
    "Workload": (Workload, ModelSpec, Arrival, Application, Stage, LinearLatency, LatencyTable),
    "Cluster": (Cluster, Node, GpuGroup),
    "Profile": (Profile, ModelProfile, ProfilePoint, Fit, Measured),
    "Plan": (Plan, PolicyUsed, PlannedGpu, Gpulet, MergedGroup, Replica, Expected, ExpectedModel),
}


@pytest.mark.parametrize(("section", "schema"), [(s, m) for s, schemas in SCHEMAS.items() for m in schemas])
def test_every_key_is_explained(section: str, schema: type[BaseModel]) -> None:
    for name, field in schema.model_fields.items():
        assert f"`{field.alias or name}`" in SECTIONS[section], f"{schema.__name__}.{name}"


@pytest.mark.parametrize("section", SCHEMAS)
def test_the_example_is_valid(section: str) -> None:
    code = re.search(r"```yaml\n(.*?)```", SECTIONS[section], re.DOTALL)
    assert code is not None
    parse_document(SCHEMAS[section][0], yaml.safe_load(code.group(1)))
