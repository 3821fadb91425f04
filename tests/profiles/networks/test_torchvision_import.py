import importlib
import subprocess
import sys

import pytest

from tenuto.errors import EnvironmentFaultError
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
