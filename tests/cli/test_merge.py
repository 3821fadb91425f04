"""`tenuto merge` on small networks of a user's own."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from tenuto.cli.merge import command
from tenuto.errors import InvalidInputError


def run(*arguments: str) -> tuple[int, str]:
    ran = CliRunner().invoke(command, list(arguments))
    if isinstance(ran.exception, InvalidInputError):
        raise ran.exception
    return ran.exit_code, ran.stdout


def test_a_fine_tuned_copy_is_merged_and_timed() -> None:
    small = ["--option", "image_size=32", "--repetitions", "1"]
    code, text = run(
        "base=mobilenet_v2", "tuned=mobilenet_v2", "--reseed", "tuned=classifier", "--batch-size", "1", "--json", *small
    )

    assert code == 0
    found = json.loads(text)
    (cluster,) = found["clusters"]
    assert cluster["operators_before"] == 2 * 53
    assert cluster["operators_after"] == 52 + 2  # all but the two classifiers run once
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
