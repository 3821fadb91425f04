"""The merged program as a gpu-let runs it: joint batches from numpy to numpy, equal to the models by themselves."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
import torch

from tenuto.deployments.gpulet.executors.torch_executor import TorchExecutor
from tenuto.errors import InvalidInputError
from tenuto.profiles.networks.catalogue import LoadedModel, ModelSignature, TensorSignature
from tenuto.profiles.networks.merging.runner import MergedRunner, even_split

from .test_merging import Attention, Convolutional

IMAGES = ModelSignature(
    "tensor", (TensorSignature("x", "float32", (3, 8, 8)),), (TensorSignature("y", "float32", (5,)),)
)


def tuned(changed: str, seed: int = 1) -> LoadedModel:
    """A copy of one base network with new weights in the modules that begin with `changed`."""
    torch.manual_seed(0)
    module = Convolutional().eval()
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name.startswith(changed or "-"):
                parameter.copy_(torch.randn(parameter.shape) * 0.3)
    return LoadedModel(module, IMAGES)


def base() -> LoadedModel:
    return tuned("")


def head() -> LoadedModel:
    return tuned("head")


def second_and_head() -> LoadedModel:
    return tuned(("second", "head"), 2)  # type: ignore[arg-type]  # str.startswith takes both


def unlike() -> LoadedModel:
    return tuned(("first", "norm", "second", "head"), 3)  # type: ignore[arg-type]


def attention() -> LoadedModel:
    tensors = (TensorSignature("x", "float32", (6, 12)),), (TensorSignature("y", "float32", (4,)),)
    return LoadedModel(Attention().eval(), ModelSignature("tensor", *tensors))


def images(rows: int, seed: int = 0) -> dict[str, np.ndarray]:
    return {"x": np.random.default_rng(seed).standard_normal((rows, 3, 8, 8), dtype=np.float32)}


def check(runner: MergedRunner, models: Mapping[str, LoadedModel], sizes: Mapping[str, int]) -> None:
    given = {name: images(rows, seed) for seed, (name, rows) in enumerate(sizes.items())}
    found = runner.run(given, sizes)
    assert set(found) == {name for name, rows in sizes.items() if rows}
    for name, answer in found.items():
        with torch.no_grad():
            right = models[name].module(torch.from_numpy(given[name]["x"])).numpy()
        assert answer["y"].shape == (sizes[name], 5)
        assert np.abs(answer["y"] - right).max() <= 1e-5 * np.abs(right).max()


@pytest.fixture(scope="module")
def three() -> tuple[MergedRunner, dict[str, LoadedModel]]:
    models = {"a": base(), "b": head(), "c": second_and_head()}
    return MergedRunner.of({name: factory() for name, factory in (("a", base), ("b", head), ("c", second_and_head))},
                           "cpu"), models  # fmt: skip


@pytest.mark.parametrize(
    "sizes",
    [
        {"a": 2, "b": 2, "c": 2},
        {"a": 1, "b": 4, "c": 2},
        {"a": 3, "c": 1},
        {"b": 1, "c": 5},
        {"b": 3},
        {"c": 1, "a": 0},
        {"c": 2, "b": 1, "a": 1},
    ],
)
def test_every_member_of_a_joint_batch_gets_its_own_outputs(
    three: tuple[MergedRunner, dict[str, LoadedModel]], sizes: dict[str, int]
) -> None:
    check(*three, sizes)


def test_facts_say_what_is_held_once(three: tuple[MergedRunner, dict[str, LoadedModel]]) -> None:
    facts = three[0].facts
    assert facts["operators_after"] < facts["operators_before"]
    assert facts["memory_after_mib"] < facts["memory_before_mib"]
    assert facts["worst_error"] <= 1e-5


def test_the_originals_are_let_go(three: tuple[MergedRunner, dict[str, LoadedModel]]) -> None:
    assert all(not model.weights for model in three[0]._merged._plan.models.values())


def test_read_only_inputs_are_taken_and_warm_up_runs(three: tuple[MergedRunner, dict[str, LoadedModel]]) -> None:
    runner, _ = three
    frozen = np.frombuffer(images(2)["x"].tobytes(), np.float32).reshape(2, 3, 8, 8)
    assert not frozen.flags.writeable
    np.testing.assert_array_equal(runner.run({"a": {"x": frozen}}, {"a": 2})["a"]["y"],
                                  runner.run({"a": images(2)}, {"a": 2})["a"]["y"])  # fmt: skip
    runner.warm_up([1, 2, 3], 1)


@pytest.mark.parametrize("other", [unlike, attention])
def test_models_that_do_not_merge_are_refused_with_the_cure(other: object) -> None:
    assert callable(other)
    with pytest.raises(InvalidInputError, match=r"cannot run as one program .* Remove the group from `merge`"):
        MergedRunner.of({"a": base(), "b": other()}, "cpu")


def test_a_partner_that_does_not_merge_keeps_the_group_from_being_served() -> None:
    with pytest.raises(InvalidInputError, match="cannot run as one program"):
        MergedRunner.of({"a": base(), "b": head(), "c": unlike()}, "cpu")


def entry(name: str, factory: str, **options: object) -> dict[str, object]:
    return {"name": name, "source": f"tests.profiles.test_merged_runner:{factory}", "weights_path": None,
            "options": options}  # fmt: skip


def test_the_executor_loads_runs_and_releases_a_group() -> None:
    executor = TorchExecutor("cpu", cores=1)
    executor.load_merged("a+b", [entry("a", "base", warmup_runs=1), entry("b", "head", warmup_runs=1)], [1, 4])
    outputs, time_ms = executor.run_merged("a+b", {"a": images(1), "b": images(2)}, {"a": 1, "b": 2})
    assert (outputs["a"]["y"].shape, outputs["b"]["y"].shape, time_ms > 0) == ((1, 5), (2, 5), True)
    assert executor.signature("b")["outputs"][0]["name"] == "y"
    assert executor.merged()["a+b"]["worst_error"] <= 1e-5
    executor.unload("a+b")
    assert executor.merged() == {}
    with pytest.raises(KeyError):
        executor.signature("a")
    executor.close()


def test_options_a_merged_program_does_not_know_are_refused() -> None:
    executor = TorchExecutor("cpu", cores=1)
    with pytest.raises(InvalidInputError, match=r"dtype: bf16.*merged"):
        executor.load_merged("a+b", [entry("a", "base", dtype="bf16"), entry("b", "head")], [1])
    assert executor.merged() == {}


def test_an_even_split_leaves_out_members_without_rows() -> None:
    assert even_split(("a", "b", "c"), 7) == {"a": 3, "b": 2, "c": 2}
    assert even_split(("a", "b", "c"), 2) == {"a": 1, "b": 1}
