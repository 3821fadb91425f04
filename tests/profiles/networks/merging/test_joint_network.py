"""The merged program as a gpu-let runs it: joint batches from numpy to numpy, equal to the models by themselves."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from tenuto.errors import InvalidInputError
from tenuto.profiles.networks.catalogue import LoadedModel, ModelSignature, TensorSignature
from tenuto.profiles.networks.inputs import as_blocks
from tenuto.profiles.networks.merging.joint_network import Merged, MergedNetwork, even_split
from tenuto.profiles.networks.programs import Member, load_program, prepare_program
from tenuto.profiles.networks.runner import ProgramRunner
from tests.instruments.mergeable import Attention, Convolutional

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


def check(runner: ProgramRunner, models: Mapping[str, LoadedModel], sizes: Mapping[str, int]) -> None:
    given = {name: images(rows, seed) for seed, (name, rows) in enumerate(sizes.items())}
    found = runner.run({name: as_blocks(arrays) for name, arrays in given.items()}, sizes)
    assert set(found) == {name for name, rows in sizes.items() if rows}
    for name, answer in found.items():
        with torch.no_grad():
            right = models[name].module(torch.from_numpy(given[name]["x"])).numpy()
        assert answer["y"].shape == (sizes[name], 5)
        assert np.abs(answer["y"] - right).max() <= 1e-5 * np.abs(right).max()


@pytest.fixture(scope="module")
def three() -> tuple[ProgramRunner, dict[str, LoadedModel]]:
    models = {"a": base(), "b": head(), "c": second_and_head()}
    merged = Merged.of({"a": base(), "b": head(), "c": second_and_head()})
    network = MergedNetwork(merged.clusters, merged.signatures, (3,), merged.report)
    network.settle(torch.device("cpu"))
    return ProgramRunner(network), models


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
    three: tuple[ProgramRunner, dict[str, LoadedModel]], sizes: dict[str, int]
) -> None:
    check(*three, sizes)


def test_facts_say_what_is_held_once(three: tuple[ProgramRunner, dict[str, LoadedModel]]) -> None:
    facts = three[0].network.facts()
    assert facts["operators_after"] < facts["operators_before"]
    assert facts["memory_after_mib"] < facts["memory_before_mib"]
    assert facts["worst_error"] <= 1e-5


def test_originals_are_let_go_and_what_they_have_in_common_is_held_once() -> None:
    models = {"a": base(), "b": head(), "c": second_and_head()}
    weights = [(key, weight) for loaded in models.values() for key, weight in loaded.module.state_dict().items()]
    copies = [(key, weight.clone(), StorageWeakRef(weight.untyped_storage())) for key, weight in weights]

    def held_twice() -> list[str]:
        gc.collect()
        held = [(key, copy) for key, copy, storage in copies if not storage.expired()]
        return [key for (key, one), (same, other) in combinations(held, 2) if key == same and torch.equal(one, other)]

    merged = Merged.of(models)
    del models, weights
    assert held_twice()
    for cluster in merged.clusters:
        cluster.settle("cpu")
    assert not held_twice()


def test_read_only_inputs_in_pieces_are_taken(three: tuple[ProgramRunner, dict[str, LoadedModel]]) -> None:
    runner, _ = three
    frozen = np.frombuffer(images(2)["x"].tobytes(), np.float32).reshape(2, 3, 8, 8)
    assert not frozen.flags.writeable
    whole = runner.run({"a": as_blocks(images(2))}, {"a": 2})["a"]["y"]
    for blocks in ((frozen,), (frozen[:1], frozen[1:])):
        np.testing.assert_array_equal(runner.run({"a": {"x": blocks}}, {"a": 2})["a"]["y"], whole)


def test_warm_up_runs_joint_batches_and_the_largest_of_every_model_alone(
    three: tuple[ProgramRunner, dict[str, LoadedModel]],
) -> None:
    runner, _ = three
    assert list(runner.network.warm_up_rows()) == [{"a": 1, "b": 1, "c": 1}, {"a": 3}, {"b": 3}, {"c": 3}]
    runner.warm_up(1)


@pytest.mark.parametrize("others", [(unlike,), (attention,)])
def test_models_that_do_not_merge_are_refused_with_the_cure(others: tuple[Callable[[], LoadedModel], ...]) -> None:
    models = {f"m{number}": factory() for number, factory in enumerate((base, *others))}
    with pytest.raises(InvalidInputError, match=r"cannot run as one program .* Remove the group from `merge`"):
        Merged.of(models)


def member(name: str, factory: str, **options: object) -> Member:
    return Member(name, f"tests.profiles.networks.merging.test_joint_network:{factory}", options=options)


def three_members() -> list[Member]:
    return [member("a", "base", warmup_runs=1), member("b", "head"), member("c", "unlike")]


def test_single_graphs_and_merged_ones_answer_alike_and_what_does_not_merge_stays_single(tmp_path: Path) -> None:
    file = str(tmp_path / "merged")
    prepare_program(three_members(), file)
    models = {"a": base(), "b": head(), "c": unlike()}
    single, merged = load_program(three_members(), [1, 4]), load_program(three_members(), [1, 4], prepared_file=file)
    for runner in (single, merged):
        assert list(runner.signatures) == ["a", "b", "c"]
        for sizes in ({"a": 1, "b": 2, "c": 1}, {"b": 4}, {"c": 2, "a": 2}):
            check(runner, models, sizes)
    assert (single.network.way, single.network.facts()) == ("single graphs", {})
    assert merged.network.way == "merged in part"
    assert merged.network.weights_mib < single.network.weights_mib
    assert merged.network.facts()["worst_error"] <= 1e-5
    (note,) = merged.network.notes
    assert note.startswith("c runs by itself")


def test_options_a_merged_program_does_not_know_are_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"dtype: bf16.*merged"):
        load_program([member("a", "base", dtype="bf16"), member("b", "head")], [1])


def test_an_even_split_leaves_out_members_without_rows() -> None:
    assert even_split(("a", "b", "c"), 7) == {"a": 3, "b": 2, "c": 2}
    assert even_split(("a", "b", "c"), 2) == {"a": 1, "b": 1}
