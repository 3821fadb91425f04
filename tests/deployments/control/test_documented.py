"""docs/reference/control.md explains every setting, and its example is valid."""

from __future__ import annotations

import re
from pathlib import Path

import yaml
from pydantic import BaseModel

from tenuto.deployments.control.settings import ControlSettings

TEXT = (Path(__file__).parents[3] / "docs" / "reference" / "control.md").read_text()


def test_every_key_is_explained_and_the_example_is_valid() -> None:
    for name, field in ControlSettings.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            for inner in kind.model_fields:
                assert f"`{name}.{inner}`" in TEXT
        else:
            assert f"`{name}`" in TEXT
    code = re.search(r"```yaml\n(.*?)```", TEXT, re.DOTALL)
    assert code is not None
    assert ControlSettings.model_validate(yaml.safe_load(code.group(1))).mode == "act"
