"""Merging models that hold equal weights: what is shared, and that every output stays that of the original."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import pytest
import torch

from tenuto.errors import InvalidInputError
from tenuto.profiles.networks.catalogue import ModelSignature, TensorSignature
from tenuto.profiles.networks.merging.merge import MergedModels, merge_models
from tenuto.profiles.networks.merging.report import MergeReport
from tests.instruments.mergeable import Attention, Convolutional


class Branching(torch.nn.Module):
    """Its control flow depends on values, which no trace can hold."""

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return image * 2 if bool(image.sum() > 0) else image


def signature(*shape: int) -> ModelSignature:
    return ModelSignature("tensor", (TensorSignature("x", "float32", shape),), ())


class Flattening(torch.nn.Module):
    """Tokens and requests lie in one dimension, as in GPT-2's projections."""

    def __init__(self) -> None:
        super().__init__()
        self.projection = torch.nn.Linear(12, 12)
        self.head = torch.nn.Linear(12, 4)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        flat = torch.addmm(self.projection.bias, tokens.reshape(-1, 12), self.projection.weight)
        return cast(torch.Tensor, self.head(flat.reshape(tokens.shape).mean(1)))


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


def test_what_stays_equal_around_a_fine_tuned_convolution_is_shared_and_outputs_stay(tuned: Tuned) -> None:
    cluster = tuned.report.clusters[0]

    assert {op.names["b"]: op.parameters for op in cluster.operators} == {"first.weight": 216, "head.weight": 40}
    assert (cluster.operators_before, cluster.operators_after) == (6, 4)
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

    assert (cluster.operators_before, cluster.operators_after) == (6, 3)
    assert cluster.memory_after_mib == pytest.approx(cluster.memory_before_mib / 2, rel=0.05)
    assert_same(merged, (3, 8, 8), {"a": a, "b": b}, a=2, b=3)


def test_equal_graphs_without_common_weights_stay_apart_with_the_reason() -> None:
    torch.manual_seed(1)
    merged, report = merge(IMAGE, a=Convolutional().eval(), b=Convolutional().eval())

    assert merged == []
    assert set(report.unmerged) == {"a", "b"}
    assert "no operator has the weights" in report.unmerged["a"]


def test_other_graphs_and_untraceable_models_stay_apart_while_the_rest_merges() -> None:
    a, b = pair(Convolutional)
    models = {"a": (a, IMAGE), "b": (b, IMAGE), "t": (Attention().eval(), TOKENS), "w": (Branching().eval(), IMAGE)}
    (merged,), report = merge_models(models)

    assert merged.names == ("a", "b")
    assert "same graph" in report.unmerged["t"]
    assert "cannot be traced" in report.unmerged["w"]


def test_one_model_is_nothing_to_merge() -> None:
    with pytest.raises(InvalidInputError, match="at least two"):
        merge(IMAGE, a=Convolutional().eval())


def test_the_originals_are_left_as_they_are(tuned: Tuned) -> None:
    assert all(torch.equal(tensor, tuned.before[name]) for name, tensor in tuned.modules["b"].state_dict().items())


@pytest.mark.parametrize("kind", [Attention, Flattening])
def test_texts_of_two_lengths_run_apart_until_their_sizes_are_equal(kind: type[torch.nn.Module]) -> None:
    a, b = pair(kind)
    (merged,), report = merge_models({"a": (a, signature(6, 12)), "b": (b, signature(9, 12))})

    assert [op.names["a"] for op in report.clusters[0].operators] == ["head.weight"]
    assert report.clusters[0].memory_after_mib == pytest.approx(report.clusters[0].memory_before_mib / 2)
    with torch.inference_mode():
        given = {"a": torch.randn(3, 6, 12), "b": torch.randn(2, 9, 12)}
        found = merged.run({name: (tensor,) for name, tensor in given.items()})
        for name, module in {"a": a, "b": b}.items():
            assert torch.allclose(found[name][0], module(given[name]), atol=1e-5)


class Tied(torch.nn.Module):
    """Two operators of one depth have one weight, as in networks with two arms."""

    def __init__(self) -> None:
        super().__init__()
        self.arm = torch.nn.Linear(12, 12)
        self.head = torch.nn.Linear(12, 4)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return cast(torch.Tensor, self.head(self.arm(tokens.relu()) * self.arm(tokens.sin())).mean(1))


def test_operators_of_one_weight_at_one_depth_stay_two() -> None:
    a, b = pair(Tied)
    cast(Any, b).head.weight.data += 0.1
    (merged,), _ = merge(TOKENS, a=a, b=b)
    for sizes in ({"a": 2, "b": 3}, {"b": 1}):
        assert_same(merged, (6, 12), {"a": a, "b": b}, **sizes)


def test_three_models_share_what_any_two_have_in_common() -> None:
    a, b = pair(Convolutional)
    c = Convolutional().eval()
    c.load_state_dict(a.state_dict())
    cast(Any, a).first.weight.data += 0.1
    cast(Any, b).second.weight.data += 0.1
    cast(Any, c).head.weight.data += 0.1
    (merged,), report = merge(IMAGE, a=a, b=b, c=c)
    assert sorted("".join(op.names) for op in report.clusters[0].operators) == ["ab", "ac", "bc"]
    for sizes in ({"a": 2, "b": 2, "c": 1}, {"a": 1, "c": 5}, {"b": 3, "c": 2}):
        assert_same(merged, (3, 8, 8), {"a": a, "b": b, "c": c}, **sizes)
