"""TorchScript as a source: the options name what the file does not."""

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tenuto.errors import InvalidInputError
from tenuto.profiles.networks.models import build
from tenuto.profiles.networks.programs import Member, load_program

pytestmark = pytest.mark.unit
SHAPES = {"x": ["batch", 4], "mask": ["batch", 3], "y": ["batch", 3], "total": ["batch"]}


class Masked(torch.nn.Module):
    """Two inputs, two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.layer(x) * mask, x.sum(1)


@pytest.fixture
def file(tmp_path: Path) -> str:
    """The file of a scripted network."""
    torch.manual_seed(0)
    with warnings.catch_warnings(category=DeprecationWarning, action="ignore"):
        torch.jit.script(Masked()).save(str(tmp_path / "net.pt"))
    return str(tmp_path / "net.pt")


def test_its_answers_are_those_of_the_network_itself(file: str) -> None:
    options: dict[str, Any] = {"shapes": SHAPES, "types": {"mask": "int64"}}
    runner = load_program([Member("net", file, None, options)], [1, 4], None)
    signature = runner.signatures["net"]
    assert [(t.name, t.dtype, t.shape) for t in signature.inputs] == [("x", "float32", (4,)), ("mask", "int64", (3,))]
    x, mask = np.random.default_rng(1).standard_normal((3, 4), np.float32), np.array([[1, 0, 1]] * 3)
    outputs = runner.run({"net": {"x": [x], "mask": [mask]}}, {"net": 3})["net"]
    torch.manual_seed(0)
    expected = Masked()(torch.from_numpy(x), torch.from_numpy(mask))
    np.testing.assert_array_equal(outputs["y"], expected[0].detach().numpy())
    np.testing.assert_array_equal(outputs["total"], expected[1].detach().numpy())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "takes 2 tensors"),
        ({"shapes": {"x": ["batch", 4], "mask": ["batch", 3]}}, "its inputs first"),
        ({"shapes": SHAPES, "types": {"z": "int64"}}, "is not in the file"),
        ({"shapes": SHAPES, "types": {"x": "complex64"}}, "no type served here"),
        ({"shapes": SHAPES | {"x": ["batch", "n"]}}, "has no largest"),
    ],
)
def test_options_that_say_too_little_are_refused(options: dict[str, Any], said: str, file: str) -> None:
    with pytest.raises(InvalidInputError, match=said):
        build(file, options=options)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 damaged", b"\x80\x02}."])
def test_a_file_that_is_no_torchscript_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "net.pt").write_bytes(content)
    with pytest.raises(InvalidInputError, match=r"torch\.jit\.save"):
        build(str(tmp_path / "net.pt"), options={"shapes": SHAPES})


def test_weights_alone_are_no_network(tmp_path: Path) -> None:
    torch.save(Masked().state_dict(), tmp_path / "net.pt")
    with pytest.raises(InvalidInputError, match="weights_path"):
        build(str(tmp_path / "net.pt"), options={"shapes": SHAPES})
