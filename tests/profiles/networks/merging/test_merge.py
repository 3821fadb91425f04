"""Merging models that hold equal weights: what is shared, and that every output stays that of the original."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from tenuto.errors import InvalidInputError
from tenuto.profiles.networks.catalogue import ModelSignature
from tenuto.profiles.networks.merging.merge import MergedModels, merge_models
from tenuto.profiles.networks.merging.report import MergeReport
from tests.instruments.mergeable import Attention, Convolutional


class Branching(torch.nn.Module):
    """Its control flow depends on values, which no trace can hold."""

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return image * 2 if bool(image.sum() > 0) else image


def signature(*shape: int) -> ModelSignature:
    tensor = SimpleNamespace(name="x", dtype="float32", shape=shape, below=None)
    return cast(ModelSignature, SimpleNamespace(inputs=(tensor,)))


IMAGE, TOKENS = signature(3, 8, 8), signature(6, 12)


def pair(kind: type[torch.nn.Module]) -> tuple[torch.nn.Module, torch.nn.Module]:
    torch.manual_seed(0)
    first, second = kind().eval(), kind().eval()
    second.load_state_dict(first.state_dict())
    return first, second


def merge(spec: ModelSignature, **modules: torch.nn.Module) -> tuple[list[MergedModels], MergeReport]:
    return merge_models({name: (module, spec) for name, module in modules.items()})


def assert_same(
    merged: MergedModels, shape: tuple[int, ...], modules: dict[str, torch.nn.Module], **sizes: int
) -> None:
    """The merged program gives what the modules give, on batches of these sizes."""
    batches = {name: (torch.randn(size, *shape),) for name, size in sizes.items()}
    with torch.inference_mode():
        found = merged.run(batches)
        for name, (given,) in batches.items():
            right = modules[name](given)
            assert found[name][0].shape == right.shape
            assert float((found[name][0] - right).abs().max()) <= 1e-5 * float(right.abs().max())


@dataclass
class Tuned:
    """A network and its fine-tuned copy `b`, merged; and what `b` held before."""

    modules: dict[str, torch.nn.Module]
    before: dict[str, torch.Tensor]
    merged: MergedModels
    report: MergeReport


@pytest.fixture(scope="module")
def tuned() -> Tuned:
    a, b = pair(Convolutional)
    cast(Any, b).second.weight.data[4:] += 0.3
    before = {name: tensor.clone() for name, tensor in b.state_dict().items()}
    (merged,), report = merge(IMAGE, a=a, b=b)
    return Tuned({"a": a, "b": b}, before, merged, report)


def test_a_fine_tuned_convolution_is_shared_in_part_and_outputs_stay(tuned: Tuned) -> None:
    cluster = tuned.report.clusters[0]

    assert {op.names["a"]: round(op.shared_pct) for op in cluster.operators} == {
        "first.weight": 100,
        "second.weight": 50,
        "head.weight": 100,
    }
    assert (cluster.operators_before, cluster.operators_after, cluster.operators_partly) == (6, 4, 2)
    assert cluster.worst_error <= 1e-5
    assert 0 < cluster.memory_after_mib < cluster.memory_before_mib
    for sizes in ({"a": 2, "b": 2}, {"a": 1, "b": 5}, {"a": 3}, {"b": 4}):
        assert_same(tuned.merged, (3, 8, 8), tuned.modules, **sizes)


def test_attention_with_one_changed_projection() -> None:
    a, b = pair(Attention)
    cast(Any, b).value.weight.data += 0.1
    (merged,), report = merge(TOKENS, a=a, b=b)

    shared = {op.names["a"] for op in report.clusters[0].operators}
    assert {"query.weight", "key.weight", "head.weight"} <= shared
    assert "value.weight" not in shared
    for sizes in ({"a": 2, "b": 2}, {"a": 4, "b": 1}, {"b": 3}):
        assert_same(merged, (6, 12), {"a": a, "b": b}, **sizes)


def test_equal_models_run_everything_once() -> None:
    a, b = pair(Convolutional)
    (merged,), report = merge(IMAGE, a=a, b=b)
    cluster = report.clusters[0]

    assert (cluster.operators_before, cluster.operators_after, cluster.operators_partly) == (6, 3, 0)
    assert cluster.memory_after_mib == pytest.approx(cluster.memory_before_mib / 2, rel=0.05)
    assert_same(merged, (3, 8, 8), {"a": a, "b": b}, a=2, b=3)


def test_equal_graphs_without_common_weights_stay_apart_with_the_reason() -> None:
    torch.manual_seed(1)
    merged, report = merge(IMAGE, a=Convolutional().eval(), b=Convolutional().eval())

    assert merged == []
    assert set(report.unmerged) == {"a", "b"}
    assert "in common" in report.unmerged["a"]


def test_other_graphs_and_untraceable_models_stay_apart_while_the_rest_merges() -> None:
    a, b = pair(Convolutional)
    models = {"a": (a, IMAGE), "b": (b, IMAGE), "t": (Attention().eval(), TOKENS), "w": (Branching().eval(), IMAGE)}
    (merged,), report = merge_models(models)

    assert merged.names == ("a", "b")
    assert "edits" in report.unmerged["t"]
    assert "cannot be traced" in report.unmerged["w"]


def test_one_model_is_nothing_to_merge() -> None:
    with pytest.raises(InvalidInputError, match="at least two"):
        merge(IMAGE, a=Convolutional().eval())


def test_the_originals_are_left_as_they_are(tuned: Tuned) -> None:
    assert all(torch.equal(tensor, tuned.before[name]) for name, tensor in tuned.modules["b"].state_dict().items())


def test_a_part_that_lies_elsewhere_in_the_other_weight_is_shared_too() -> None:
    a, b = pair(Convolutional)
    weight = cast(Any, a).second.weight.detach()
    moved = torch.randn_like(weight)
    moved[1:, 2:] = weight[:-1, :-2]
    cast(Any, b).second.weight.data = moved
    (merged,), report = merge(IMAGE, a=a, b=b)

    second = next(op for op in report.clusters[0].operators if op.names["a"] == "second.weight")
    assert (second.rows, second.columns) == (7, 6)
    for sizes in ({"a": 2, "b": 2}, {"a": 1, "b": 5}, {"b": 4}):
        assert_same(merged, (3, 8, 8), {"a": a, "b": b}, **sizes)
