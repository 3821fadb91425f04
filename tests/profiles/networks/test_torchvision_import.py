import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from tenuto.errors import EnvironmentFaultError
from tenuto.profiles.networks.import_factory import imported
from tenuto.profiles.networks.torchvision_import import imagenet_categories, import_torchvision


def test_models_and_transforms_are_there_and_the_import_is_repeatable() -> None:
    package = import_torchvision()
    assert import_torchvision() is package
    assert package.models.resnet50 is not None
    assert package.transforms is not None


def test_missing_operators_still_say_so_when_called() -> None:
    import torch

    package = import_torchvision()
    if package.extension._has_ops():
        pytest.skip("this torchvision was built for this torch: its operators are there")
    with pytest.raises(RuntimeError, match="custom C"):
        package.ops.nms(torch.zeros(1, 4), torch.zeros(1), 0.5)


def test_category_names_are_those_of_the_weights_and_need_no_torch() -> None:
    names = imagenet_categories()
    package = import_torchvision()
    assert len(names) == 1000
    assert list(names) == package.models.ResNet50_Weights.IMAGENET1K_V2.meta["categories"]
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from tenuto.profiles.networks.torchvision_import import imagenet_categories\n"
        "assert imagenet_categories()[281] == 'tabby', imagenet_categories()[281]"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_other_failures_are_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_name: str) -> None:
        raise RuntimeError("Detected that PyTorch and torchvision were compiled with different CUDA major versions.")

    monkeypatch.setattr(importlib, "import_module", fail)
    with pytest.raises(EnvironmentFaultError, match="different CUDA major versions"):
        import_torchvision()


def test_absent_torchvision_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_name: str) -> None:
        raise ModuleNotFoundError("No module named 'torchvision'")

    monkeypatch.setattr(importlib, "import_module", fail)
    with pytest.raises(EnvironmentFaultError, match="Install the torchvision"):
        import_torchvision()


@pytest.mark.parametrize("fault", ["operator torchvision::nms does not exist", "another fault"])
def test_what_a_factory_imports_goes_without_operators_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fault: str
) -> None:
    """transformers and most users' modules import torchvision by themselves."""
    package = tmp_path / "torchvision"
    package.mkdir()
    (package / "__init__.py").write_text("from torchvision import _meta_registrations\n")
    (package / "_meta_registrations.py").write_text(f"raise RuntimeError({fault!r})\n")
    (tmp_path / "their_module.py").write_text("import torchvision\n\ndef make():\n    return torchvision.__file__\n")
    for name in [name for name in sys.modules if name.partition(".")[0] in ("torchvision", "their_module")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    try:
        if fault.startswith("operator"):
            assert imported("their_module:make", "model")() == str(package / "__init__.py")
        else:
            with pytest.raises(RuntimeError, match=fault):
                imported("their_module:make", "model")
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] in ("torchvision", "their_module")]:
            del sys.modules[name]
