"""Hooks of a user's own: what they may return, and how those that cannot work are refused."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from tenuto.deployments.entry.service.hook_process import Done, Faulty, ModelHooks, Postprocess, Preprocess, answer
from tenuto.errors import InvalidInputError
from tenuto.profiles.networks.catalogue import ModelSignature, TensorSignature
from tenuto.profiles.networks.hooks import Classifier, answer_json, load_hooks, made_inputs, try_hooks
from tenuto.profiles.networks.import_factory import FACTORIES
from tenuto.profiles.networks.model_options import run_option_problems

OWN = "tests.instruments.own_hooks"
SIGNATURE = ModelSignature(
    "tensor",
    (TensorSignature("x", "float32", (2,), accepts=("uint8",)), TensorSignature("ids", "int64", (3,), below=10)),
    (TensorSignature("y", "float32", (2,)),),
)
NUMBERS = ModelSignature("tensor", SIGNATURE.inputs[:1], SIGNATURE.outputs)


class Fixed:
    """Returns the same, whatever comes."""

    def __init__(self, inputs: Any = None, made: Any = None) -> None:
        self.inputs, self.made = inputs, made

    def preprocess(self, body: bytes) -> Any:
        return self.inputs

    def postprocess(self, outputs: Any) -> Any:
        return self.made


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.binary(max_size=5)
any_array = arrays.arrays(arrays.scalar_dtypes() | arrays.unicode_string_dtypes(), arrays.array_shapes(min_dims=0))
anything = st.recursive(
    scalars | any_array | st.just(object()) | st.just(iter(())),
    lambda below: st.lists(below, max_size=3) | st.dictionaries(st.text(max_size=3) | st.integers(), below, max_size=3),
    max_leaves=6,
)
inputs = st.fixed_dictionaries({"x": anything | st.just([1, 2]), "ids": anything | st.just([1, 2, 3])})


@given(anything | inputs)
def test_whatever_hooks_return_is_a_sample_of_the_model_or_their_fault(returned: Any) -> None:
    said, parts = answer(ModelHooks(Fixed(returned), SIGNATURE), Preprocess(), b"body")
    if isinstance(said, Done):
        ((x, ids_),) = said.requests
        sizes = [np.dtype(x[1]).itemsize * 2, 8 * 3]
        assert x[1] in ("float32", "uint8")
        assert ids_[1] == "int64"
        assert [x[3], ids_[3]] == sizes
        assert [part.nbytes for part in parts] == sizes
        ids = np.frombuffer(parts[1], np.int64)
        assert ((ids >= 0) & (ids < 10)).all()
    else:
        assert isinstance(said, Faulty)
        assert said.text


@given(anything)
def test_whatever_hooks_answer_is_json_or_their_fault(returned: Any) -> None:
    outputs = [("y", "float32", (2,))]
    said, parts = answer(ModelHooks(Fixed(made=returned), SIGNATURE), Postprocess(outputs), bytes(8))
    if isinstance(said, Done):
        json.loads(bytes(parts[0]))
    else:
        assert isinstance(said, Faulty)
        assert said.text


@pytest.mark.parametrize(
    ("returned", "told"),
    [
        (None, "returned no mapping"),
        ({"x": [1, 2]}, "Return exactly: x, ids"),
        ({"x": [1, 2], "ids": [1, 2, 3], "z": 0}, "Return exactly: x, ids"),
        ({"x": [[1, 2]], "ids": [1, 2, 3]}, r"without a batch dimension"),
        ({"x": [[1], [1, 2]], "ids": [1, 2, 3]}, r"must be float32 \[2\]"),
        ({"x": ["a", "b"], "ids": [1, 2, 3]}, r"must be float32 \[2\]"),
        ({"x": [1, 2], "ids": [1.0, 2.0, 3.0]}, r"must be int64 \[3\]"),
        ({"x": [1, 2], "ids": [1, 2, 10]}, r"\[0, 10\)"),
    ],
)
def test_what_is_no_sample_of_the_model_is_refused_with_the_cure(returned: Any, told: str) -> None:
    with pytest.raises(InvalidInputError, match=told):
        made_inputs(SIGNATURE, returned)


def test_arrays_are_converted_where_that_loses_no_more_than_precision() -> None:
    x, ids = made_inputs(SIGNATURE, {"x": np.array([1.5, 2.0]), "ids": np.array([1, 2, 3], np.uint8)})
    assert (x.dtype, x.tolist(), ids.dtype) == (np.float32, [1.5, 2.0], np.int64)
    strided = made_inputs(NUMBERS, {"x": np.arange(4, dtype=np.float32)[::2]})[0]
    assert strided.flags.c_contiguous
    assert made_inputs(NUMBERS, {"x": np.array([1, 2], np.uint8)})[0].dtype == np.uint8  # the model takes both


def test_an_answer_is_what_json_can_say() -> None:
    made = {"top": np.float32(0.5), "box": np.array([1, 2]), "none": float("nan")}
    assert json.loads(answer_json(made)) == {"top": 0.5, "box": [1, 2], "none": None}
    with pytest.raises(InvalidInputError, match="JSON cannot say it"):
        answer_json({"y": object()})


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("tests.no_such:Hooks", "cannot be imported"),
        (f"{OWN}:NoSuch", "cannot be imported"),
        (f"{OWN}:half", "made a object without preprocess and postprocess"),
        (f"{OWN}:broken", "cannot be made .KeyError: 'weights'"),
    ],
)
def test_what_are_no_hooks_is_refused_with_the_cure(source: str, told: str) -> None:
    with pytest.raises(InvalidInputError, match=told):
        load_hooks(source, NUMBERS)


def test_hooks_come_from_where_factories_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FACTORIES, "ours")
    with pytest.raises(InvalidInputError, match="allowed from: ours"):
        load_hooks(f"{OWN}:Numbers", NUMBERS)


def test_hooks_are_tried_with_their_own_example() -> None:
    asked = []

    def run(batch: dict[str, Any]) -> dict[str, Any]:
        asked.append(batch["x"].tolist())
        return {"y": batch["x"] * 2}

    try_hooks(f"{OWN}:Numbers", NUMBERS, run)
    assert asked == [[[0.5, 0.5]]]
    with pytest.raises(InvalidInputError, match="failed with their own example"):
        try_hooks(f"{OWN}:Halves", NUMBERS, run)
    try_hooks("tenuto.profiles.networks.hooks:Classifier", NUMBERS, run)  # has none
    assert len(asked) == 1


def test_a_model_without_hooks_of_its_own_reads_pictures_and_texts() -> None:
    made = load_hooks("tenuto.profiles.networks.hooks:Classifier", NUMBERS)
    assert isinstance(made, Classifier)
    with pytest.raises(InvalidInputError, match="tensors only"):
        made.preprocess(b"picture")


@pytest.mark.parametrize("options", [{"hooks": "no factory"}, {"hook_processes": 0}, {"hooks": 5}])
def test_wrong_options_are_found_before_anything_starts(options: dict[str, Any]) -> None:
    (problem,) = run_option_problems(options, "models.0.options")
    assert problem.path == f"models.0.options.{next(iter(options))}"
    assert problem.cure
