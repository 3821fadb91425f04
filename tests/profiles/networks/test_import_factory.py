"""Code and weights come only from where they are allowed to, and nothing is imported or read before that is known."""

import os
import sys
from pathlib import Path

import pytest

from tenuto.errors import InvalidInputError
from tenuto.profiles.networks.import_factory import FACTORIES, MODEL_PATHS, check_factory, check_path
from tenuto.profiles.networks.models import build


def test_a_factory_elsewhere_is_refused_before_its_module_is_imported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "foreign_module.py").write_text("raise SystemExit('imported')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(FACTORIES, "ours, theirs.models")
    with pytest.raises(InvalidInputError, match=r"allowed from: ours, theirs\.models\. Add its package to TENUTO_FAC"):
        build("foreign_module:make")
    assert "foreign_module" not in sys.modules
    for source in ("ours:make", "ours.deep.inside:make", "theirs.models:make"):
        check_factory(source)
    for source in ("ours_too:make", "theirs:make", "theirs.other:make"):
        with pytest.raises(InvalidInputError):
            check_factory(source)
    monkeypatch.setenv(FACTORIES, "")
    with pytest.raises(InvalidInputError, match="allowed from: none"):
        check_factory("ours:make")


def test_weights_elsewhere_are_refused_also_through_links_and_dots(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    allowed, other = tmp_path / "allowed", tmp_path / "other"
    for folder in (allowed, other):
        folder.mkdir()
        (folder / "w.safetensors").write_bytes(b"")
    (allowed / "link").symlink_to(other / "w.safetensors")
    monkeypatch.setenv(MODEL_PATHS, os.pathsep.join([str(allowed), "/nowhere"]))
    check_path(allowed / "w.safetensors", "weights_path")
    for path in (other / "w.safetensors", allowed / "link", allowed / ".." / "other" / "w.safetensors"):
        with pytest.raises(InvalidInputError, match="weights_path"):
            build("resnet18", weights_path=str(path))


def test_unset_everything_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (FACTORIES, MODEL_PATHS):
        monkeypatch.delenv(name, raising=False)
    check_factory("anything:make")
    check_path("/anywhere", "weights_path")
