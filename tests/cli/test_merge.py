"""`tenuto merge` on small networks of a user's own."""

from __future__ import annotations

import json

import pytest
import torch
from click.testing import CliRunner

from tenuto.cli.merge import command
from tenuto.errors import InvalidInputError
from tenuto.profiles.catalogue import LoadedModel, ModelSignature, TensorSignature

from ..profiles.test_merging import Attention


def run(*arguments: str) -> tuple[int, str]:
    ran = CliRunner().invoke(command, list(arguments))
    if isinstance(ran.exception, InvalidInputError):
        raise ran.exception
    return ran.exit_code, ran.stdout


def small() -> LoadedModel:
    """A network of a user's own, the same at every call."""
    torch.manual_seed(0)
    tensor = TensorSignature("x", "float32", (6, 12))
    return LoadedModel(Attention(), ModelSignature("tensor", (tensor,), (TensorSignature("y", "float32", (4,)),)))


def test_a_fine_tuned_copy_is_merged_and_timed() -> None:
    source = "tests.cli.test_merge:small"
    code, text = run(f"base={source}", f"tuned={source}", "--reseed", "tuned=head", "--repetitions", "1", "--json")

    assert code == 0
    found = json.loads(text)
    (cluster,) = found["clusters"]
    assert (cluster["operators_before"], cluster["operators_after"]) == (8, 5)  # all but the two heads run once
    assert cluster["worst_error"] <= 1e-5
    assert cluster["apart_ms"] > 0
    assert cluster["together_ms"] > 0
    assert found["unmerged"] == {}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("resnet50", "resnet50"), "is given twice"),
        (("a=resnet50", "b=resnet50", "--weights", "c=x"), "is no name of a model"),
        (("a=resnet50", "b=resnet50", "--reseed", "a"), "must read NAME=VALUE"),
        (("a=resnet50", "b=resnet50", "--batch-size", "0"), "must be at least 1"),
    ],
)
def test_bad_arguments_name_the_cure(arguments: tuple[str, ...], words: str) -> None:
    with pytest.raises(InvalidInputError, match=words):
        run(*arguments)
