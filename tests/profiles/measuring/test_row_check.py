"""Networks whose rows depend on each other, or on padding, are refused by the name of what they change."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tenuto.errors import InvalidInputError
from tenuto.profiles.measuring.row_check import check_rows
from tenuto.profiles.networks.catalogue import LoadedModel, ModelSignature, SizeRange, TensorSignature
from tenuto.profiles.networks.model_options import RunOptions
from tenuto.profiles.networks.programs import lone_program

IDS, MASK = (TensorSignature(name, "float32", ("n",), pad=0.0) for name in ("x", "attention_mask"))


class Net(torch.nn.Module):
    """Calls a function."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, *tensors: torch.Tensor) -> Any:
        return self.function(*tensors)


def checked(function: Any, *, padded: bool = False, most_rows: int = 4, **more: Any) -> list[str]:
    inputs = (IDS, MASK) if padded else (TensorSignature("x", "float32", (3,)),)
    outputs = (TensorSignature("y", "float32", ()), TensorSignature("z", "float32", ()))
    signature = ModelSignature("tensor", inputs, outputs, **more)
    runner = lone_program("m", LoadedModel(Net(function).eval(), signature), RunOptions())
    return check_rows(runner, [(5,), (9,)] if padded else [()], most_rows, 0)


def test_independent_rows_pass_without_a_word() -> None:
    assert checked(lambda x: (x.sum(1), x.exp().sum(1))) == []


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (x.sum(1), x.sum(1) - x.sum(1).mean()),
        lambda x: (x.sum(1), x.sum(1) * len(x)),
        lambda x: (x.sum(1), x.sum(1).flip(0)),
    ],
)
def test_rows_that_depend_on_their_batch_are_refused(function: Any) -> None:
    with pytest.raises(InvalidInputError, match=r"'z by .* %': the rows of a batch change.*{\"shapes\": {\"x\": \[1"):
        checked(function)
    assert checked(function, most_rows=1) == []


def test_a_small_difference_is_only_noted() -> None:
    (note,) = checked(lambda x: (x.sum(1), x.sum(1) * (1.0 + 0.02 * (len(x) - 1))))
    assert note.startswith("the rows of a batch change each other's outputs: z by 2 %")


def test_an_output_without_any_number_is_noted() -> None:
    (note,) = checked(lambda x: (x.sum(1), x.sum(1) * torch.nan))
    assert note.startswith("z: nothing but NaN for made-up inputs")


def test_padding_must_not_change_what_a_row_gives() -> None:
    sizes = {"n": SizeRange(9)}

    def masked(x: torch.Tensor, mask: torch.Tensor) -> Any:
        return (x * mask).sum(1), (x * mask).sum(1) / mask.sum(1)

    assert checked(masked, padded=True, sizes=sizes) == []
    with pytest.raises(InvalidInputError, match=r"'y by .* %': the padding of a batch changes outputs.*`pad`"):
        checked(lambda x, mask: ((x + 1).sum(1), mask.sum(1)), padded=True, sizes=sizes)
