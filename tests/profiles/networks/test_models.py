import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tenuto.errors import InvalidInputError
from tenuto.profiles.networks.catalogue import LoadedModel
from tenuto.profiles.networks.models import build
from tenuto.profiles.networks.programs import Member, load_program
from tests.instruments.small_networks import SMALL

TEXTS = [name for name in SMALL if name != "mobilenet_v2"]


def small(name: str, **more: Any) -> LoadedModel:
    return build(name, options=SMALL[name], **more)


def texts(model: LoadedModel, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows of random identifiers of different lengths, padded as the signature says."""
    spec = model.signature.text
    assert spec is not None
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(10, 900, (rows, spec.sequence_length), generator=generator)
    mask = torch.ones_like(ids)
    for row in range(rows):
        padding = row % (spec.sequence_length - 2)
        cut = slice(0, padding) if spec.padding_side == "left" else slice(spec.sequence_length - padding, None)
        ids[row, cut] = spec.pad_id
        mask[row, cut] = 0
    return ids, mask


@pytest.mark.parametrize("name", TEXTS)
def test_text_rows_do_not_depend_on_the_batch_around_them(name: str) -> None:
    model = small(name)
    ids, mask = texts(model, 5)
    with torch.inference_mode():
        together = model.module(ids, mask)
        alone = torch.cat([model.module(ids[i : i + 1], mask[i : i + 1]) for i in range(5)])
    assert together.shape == (5, 2)
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)


def test_image_rows_do_not_depend_on_the_batch_around_them() -> None:
    model = small("mobilenet_v2")
    images = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        together = model.module(images)
        alone = torch.cat([model.module(image[None]) for image in images])
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=float(2e-4 * together.abs().max()))
    assert 0.01 < together.abs().max() < 100  # calibrated: neither vanished nor exploded


def test_t5_pools_where_transformers_does() -> None:
    model = small("t5")
    ids, mask = texts(model, 3)
    for row in range(3):
        ids[row, int(mask[row].sum()) - 1] = 1  # the end-of-text token, once, last
    with torch.inference_mode():
        ours = model.module(ids, mask)
        reference = model.module.network(input_ids=ids, attention_mask=mask).logits  # type: ignore[operator,union-attr]
    torch.testing.assert_close(ours, reference)


def test_the_seed_decides_the_weights_and_the_callers_random_state_is_kept() -> None:
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    first, second, other = small("bert", seed=1), small("bert", seed=1), small("bert", seed=0)
    assert torch.equal(torch.rand(1), expected)
    a, b, c = (next(iter(m.module.parameters())) for m in (first, second, other))
    assert torch.equal(a, b)
    assert not torch.equal(a, c)


def test_signature_follows_the_options() -> None:
    model = small("mobilenet_v2")
    assert model.signature.inputs[0].shape == (3, 32, 32)
    assert model.signature.labels[281] == "tabby"
    named = build("mobilenet_v2", options={**SMALL["mobilenet_v2"], "num_labels": 2, "labels": ["cat", "dog"]})
    assert named.signature.outputs[0].shape == (2,)
    assert named.signature.labels == ("cat", "dog")
    assert small("bert").signature.inputs[0].below == 1000
    assert not model.module.training
    assert not any(parameter.requires_grad for parameter in model.module.parameters())


@pytest.mark.parametrize("suffix", ["safetensors", "pt"])
def test_local_weights_give_the_same_outputs(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"weights.{suffix}"
    saved = small("mobilenet_v2", seed=7)
    state = {key: value.contiguous() for key, value in saved.module.state_dict().items()}
    save_file(state, path) if suffix == "safetensors" else torch.save({"state_dict": state}, path)
    loaded = small("mobilenet_v2", weights_path=str(path))
    image = torch.randn(1, 3, 32, 32)
    torch.testing.assert_close(loaded.module(image), saved.module(image))


def test_tied_weights_may_be_absent_from_the_file(tmp_path: Path) -> None:
    saved = small("t5", seed=7)
    network: Any = saved.module.network
    state = {key: value for key, value in network.state_dict().items() if not key.endswith("embed_tokens.weight")}
    save_file(state, tmp_path / "t5.safetensors")
    loaded = small("t5", weights_path=str(tmp_path / "t5.safetensors"))
    ids, mask = texts(saved, 2)
    torch.testing.assert_close(loaded.module(ids, mask), saved.module(ids, mask))


def test_weights_that_do_not_fit_are_named(tmp_path: Path) -> None:
    state = dict(small("mobilenet_v2").module.state_dict())
    state["classifier.1.bias"] = torch.zeros(3)
    state["extra.weight"] = torch.zeros(1)
    del state["classifier.1.weight"]
    path = tmp_path / "w.pt"
    torch.save(state, path)
    with pytest.raises(InvalidInputError) as caught:
        small("mobilenet_v2", weights_path=str(path))
    text = str(caught.value)
    assert "missing 1 (classifier.1.weight)" in text
    assert "unknown 1 (extra.weight)" in text
    assert "classifier.1.bias is (3,), not (1000,)" in text


class Dangerous:
    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return (print, ("executed",))


def test_pickled_objects_are_refused_and_not_executed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "w.pt"
    torch.save({"w": Dangerous()}, path)
    with pytest.raises(InvalidInputError, match=r"safe to read.*safetensors"):
        small("mobilenet_v2", weights_path=str(path))
    path.write_bytes(pickle.dumps(Dangerous()))
    with pytest.raises(InvalidInputError, match="safe to read"):
        small("mobilenet_v2", weights_path=str(path))
    assert "executed" not in capsys.readouterr().out


def test_damaged_and_absent_files(tmp_path: Path) -> None:
    (tmp_path / "w.safetensors").write_bytes(b"nonsense")
    for name, message in (("w.safetensors", "not a file of weights"), ("none.pt", "no such file")):
        with pytest.raises(InvalidInputError, match=message):
            small("mobilenet_v2", weights_path=str(tmp_path / name))


def test_local_transformers_directory(tmp_path: Path) -> None:
    saved = small("bert", seed=4)
    network: Any = saved.module.network
    network.config.id2label = {0: "bad", 1: "good"}
    network.save_pretrained(tmp_path)
    ids, mask = texts(saved, 2)
    for model in (
        build(str(tmp_path), options={"sequence_length": 8}),
        build("bert", weights_path=str(tmp_path), options={"sequence_length": 8}),
    ):
        torch.testing.assert_close(model.module(ids, mask), saved.module(ids, mask))
        assert model.signature.labels == ("bad", "good")
        assert model.signature.inputs[0].below == 1000
    with pytest.raises(InvalidInputError, match="holds a 'bert', not a 'gpt2'"):
        build("gpt2", weights_path=str(tmp_path))
    with pytest.raises(InvalidInputError, match="above the network's 512 positions"):
        build(str(tmp_path), options={"sequence_length": 513})


def test_a_directory_without_the_classifier_is_refused(tmp_path: Path) -> None:
    network: Any = small("bert").module.network
    network.bert.save_pretrained(tmp_path)
    with pytest.raises(InvalidInputError, match="lacks weights of its network"):
        build(str(tmp_path))
    with pytest.raises(InvalidInputError, match=r"no config\.json"):
        build(str(tmp_path.parent))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"imagesize": 3}, "Did you mean 'image_size'"),
        ({"config": {"depth": 3}}, "no such network can be built"),
        ({"num_labels": 3, "labels": ["a"]}, "the model has 3 outputs"),
        ({"tokenizer": "/nowhere.json"}, None),
    ],
)
def test_wrong_options(options: dict[str, Any], message: str | None) -> None:
    name = "bert" if "tokenizer" in options else "mobilenet_v2"
    merged = {**SMALL[name], **options}
    with pytest.raises(InvalidInputError, match=message or "no such file"):
        build(name, options=merged)


OWN = "tests.instruments.own_models"


def test_a_users_own_factory(tmp_path: Path) -> None:
    model = build(f"{OWN}:scale", options={"factor": 3.0})
    scaled, total = model.module(torch.ones(2, 4))
    assert scaled.tolist() == [[3.0] * 4] * 2
    assert total.tolist() == [4.0, 4.0]
    (tmp_path / "factor.txt").write_text("5")
    assert build(f"{OWN}:scale", weights_path=str(tmp_path / "factor.txt")).module.factor == 5


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        (f"{OWN}:not_a_model", {}, "returned str"),
        (f"{OWN}:broken", {}, r"the factory raised KeyError \('no weights here'\)"),
        (f"{OWN}:nothing", {}, "cannot be imported"),
        ("no_such_package:make", {}, "cannot be imported"),
        (f"{OWN}:scale", {"depth": 1}, r"cannot be called with the options \['depth'\]"),
        ("resnet51", {}, "not in the catalogue"),
    ],
)
def test_wrong_factories(source: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        build(source, options=options)


@pytest.mark.parametrize("one", [{"source": "/absent/net.pt2"}, {"weights_path": "/absent/w.safetensors"}])
def test_of_several_models_the_one_that_cannot_be_built_is_named_with_its_file(one: dict[str, str]) -> None:
    own = "tests.instruments.own_models:scale"
    members = [Member("good", own), Member("bad", one.get("source", own), one.get("weights_path"))]
    (file,) = one.values()
    for some in (members, members[1:]):
        with pytest.raises(InvalidInputError, match=f"model 'bad'.*{file}"):
            load_program(some, [1])
