"""`tenuto merge` on small networks of a user's own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from tenuto.cli.merge import command
from tenuto.errors import InvalidInputError
from tenuto.placement import Cluster, Workload, load_policy, solve
from tenuto.profiles import Profile, Profiles
from tenuto.profiles.networks.catalogue import LoadedModel, ModelSignature, TensorSignature
from tests.instruments.mergeable import Attention


def run(*arguments: str) -> tuple[int, str]:
    """Return exit code and data; wrong input is raised."""
    ran = CliRunner().invoke(command, list(arguments))
    if isinstance(ran.exception, InvalidInputError):
        raise ran.exception
    if ran.exit_code == 2:
        raise InvalidInputError(ran.output)
    return ran.exit_code, ran.stdout


def small() -> LoadedModel:
    """A network of a user's own, the same at every call."""
    torch.manual_seed(0)
    tensor = TensorSignature("x", "float32", (6, 12))
    return LoadedModel(Attention(), ModelSignature("tensor", (tensor,), (TensorSignature("y", "float32", (4,)),)))


def test_options_of_models_are_read_as_numbers() -> None:
    with pytest.raises(InvalidInputError, match=r"image_size.*some"):
        run("a=alexnet", "b=alexnet", "--option", "image_size=some")
    with pytest.raises(InvalidInputError, match="nowhere"):
        run("a=alexnet", "b=alexnet", "--option", "image_size=64", "--weights", "a=/nowhere.safetensors")


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


def test_measured_groups_are_planned_with(tmp_path: Path) -> None:
    source, file = "tests.cli.test_merge:small", tmp_path / "merged.yaml"
    sizes = ("--batch-sizes", "1,6", "--repetitions", "1", "-o", str(file), "--json")
    code, text = run(f"base={source}", f"tuned={source}", "--reseed", "tuned=head", *sizes)

    assert code == 0
    joint = json.loads(text)["clusters"][0]["joint"]
    assert [row["split"] for row in joint if row["batch_size"] == 6] == [
        {"base": 3, "tuned": 3},
        {"base": 6},
        {"tuned": 6},
    ]
    profile = Profile.load(file)
    assert list(profile.models) == ["base+tuned", "base", "tuned"]
    row = profile.models["base+tuned"]
    assert row.batch_sizes() == (1, 6)
    worst = max(one["together_ms"] for one in joint if one["batch_size"] == 6)
    assert row.latency_ms(6) == pytest.approx(worst, abs=1e-3)
    assert (row.memory_mib(6) or 0.0) > 0.0
    assert profile.models["base"].network == source

    models = [{"name": n, "source": source, "rate_rps": 5, "slo_ms": 5000} for n in ("base", "tuned")]
    workload = Workload.model_validate({"models": models, "merge": [["base", "tuned"]]})
    cluster = Cluster.model_validate({"nodes": [{"name": "n", "gpus": [{"type": "cpu", "memory_mib": 16000}]}]})
    plan = solve(load_policy("symphony", {}), workload, cluster, Profiles([profile]))
    (group,) = plan.gpulets[0].merge
    assert (group.basis, group.batch_size) == ("measured", 6)

    run(f"base={source}", f"other={source}", "--batch-sizes", "1", "--repetitions", "1", "-o", str(file))
    assert list(Profile.load(file).models) == ["base+tuned", "base", "tuned", "base+other", "other"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("resnet50", "resnet50"), "is given twice"),
        (("a=resnet50", "b=resnet50", "--weights", "c=x"), "is no name of a model"),
        (("a=resnet50", "b=resnet50", "--reseed", "a"), "must read NAME=VALUE"),
        (("a=resnet50", "b=resnet50", "--batch-size", "0"), "0 is not in the range x>=1"),
        (("a=resnet50", "b=resnet50", "--batch-sizes", "0,2"), "whole numbers separated by commas, at least 1"),
        (("a=resnet50", "b=resnet50", "--shares", "fifty"), "commas, at least 1, at most 100"),
        (("a=resnet50", "b=resnet50", "-o", "/nowhere/at/all.yaml"), "cannot be written"),
    ],
)
def test_bad_arguments_name_the_cure(arguments: tuple[str, ...], words: str) -> None:
    with pytest.raises(InvalidInputError, match=words):
        run(*arguments)
