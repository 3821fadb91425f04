import io
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageFile

from tenuto.errors import InvalidInputError
from tenuto.profiles.networks.catalogue import (
    CATALOGUE,
    ImageInput,
    ModelSignature,
    TensorSignature,
    TextInput,
    image_signature,
    text_signature,
)
from tenuto.profiles.networks.preprocess import encode_texts, image_tensor, postprocess, preprocess, text_arrays
from tenuto.profiles.networks.torchvision_import import import_torchvision

PHOTOGRAPH = Path(__file__).parents[3] / "deployments/data/grace_hopper.jpg"


def encoded(image: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, form, **options)
    return buffer.getvalue()


def noise(width: int, height: int, mode: str = "RGB") -> Image.Image:
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels).convert(mode)


def reference(body: bytes, spec: ImageInput) -> Any:
    torchvision = import_torchvision()
    from torchvision.transforms._presets import ImageClassification

    transform = ImageClassification(
        crop_size=spec.crop_px,
        resize_size=spec.resize_px,
        interpolation=torchvision.transforms.InterpolationMode(spec.interpolation),
    )
    return transform(Image.open(io.BytesIO(body)).convert("RGB")).numpy()


@pytest.mark.parametrize("name", ["resnet50", "inception_v3", "efficientnet_b7"])
def test_a_photograph_becomes_what_torchvision_makes_of_it(name: str) -> None:
    spec = CATALOGUE[name].signature.image
    assert spec is not None
    body = PHOTOGRAPH.read_bytes()
    ours = image_tensor(body, spec)
    assert ours.dtype == np.float32
    assert ours.flags.c_contiguous
    np.testing.assert_allclose(ours, reference(body, spec), rtol=0, atol=2e-7)


@pytest.mark.parametrize("size", [(300, 200), (200, 300), (33, 32), (32, 32), (1, 1), (5, 400), (257, 256)])
def test_sizes_are_rounded_as_torchvision_rounds(size: tuple[int, int]) -> None:
    spec = ImageInput(resize_px=40, crop_px=35)
    body = encoded(noise(*size))
    np.testing.assert_allclose(image_tensor(body, spec), reference(body, spec), rtol=0, atol=2e-7)


PNG_MODES, JPEG_MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "I;16", "I;16B"), ("L", "RGB", "RGBX", "CMYK", "YCbCr")


@pytest.mark.parametrize(
    ("mode", "kind"), [(mode, "PNG") for mode in PNG_MODES] + [(mode, "JPEG") for mode in JPEG_MODES]
)
def test_every_kind_of_picture_keeps_its_brightness(mode: str, kind: str) -> None:
    """The same ramp of grey, in each mode that the two formats have."""
    ramp = np.repeat(np.arange(256, dtype=np.uint8)[None, :], 256, axis=0)
    if mode.startswith("I;16"):
        order = ">u2" if mode == "I;16B" else "<u2"
        picture = Image.frombytes(mode, (256, 256), (ramp.astype(np.uint16) * 257).astype(order).tobytes())
    else:
        grey = Image.fromarray(ramp)
        picture = grey.convert(mode) if mode in ("1", "LA", "P") else grey.convert("RGB").convert(mode)
    found = image_tensor(encoded(picture, kind), ImageInput(256, 256), is_normalised=False).astype(np.float64)
    assert found.shape == (3, 256, 256)
    if mode == "1":  # dithered
        found, ramp = found.reshape(3, 256, 16, 16).mean((1, 3)), ramp.reshape(256, 16, 16).mean((0, 2))
    assert np.abs(found - ramp).max() <= (2.0 if mode == "1" else 3.0 if kind == "JPEG" else 0.0)


@pytest.mark.parametrize("body", [b"no image", b"\x89PNG\r\n\x1a\n", b"GIF89a" + b"\0" * 40, b"\xff\xd8\xff\xe0"])
def test_what_is_no_picture_is_refused_with_a_cure(body: bytes) -> None:
    with pytest.raises(InvalidInputError, match=r"Send a .*JPEG or PNG"):
        preprocess(CATALOGUE["resnet50"].signature, body)


def test_a_cut_off_picture_is_refused() -> None:
    body = PHOTOGRAPH.read_bytes()
    with pytest.raises(InvalidInputError, match="damaged"):
        preprocess(CATALOGUE["resnet50"].signature, body[: len(body) // 2])


@pytest.mark.parametrize(
    ("width", "height", "words"),
    [(7072, 7072, "50 million pixels"), (20_000, 20_000, "50 million pixels|damaged")],  # Pillow refuses the larger
)
def test_a_decompression_bomb_is_refused_before_it_is_decoded(
    width: int, height: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = encoded(Image.new("1", (1, 1)))
    size = b"IHDR" + struct.pack(">II", width, height) + small[24:29]
    bomb = small[:12] + size + struct.pack(">I", zlib.crc32(size)) + small[33:]
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda *_: pytest.fail("decoded"))
    with pytest.raises(InvalidInputError, match=words):
        image_tensor(bomb, ImageInput(16, 16))


def test_empty_body_and_tensor_models() -> None:
    tensor_only = ModelSignature("tensor", (TensorSignature("x", "float32", (1,)),), ())
    with pytest.raises(InvalidInputError, match="is empty"):
        preprocess(CATALOGUE["bert"].signature, b"")
    with pytest.raises(InvalidInputError, match="tensors only"):
        preprocess(tensor_only, b"x")


def text_tensors(text: str, spec: TextInput) -> tuple[Any, Any]:
    ((ids, mask),) = text_arrays(encode_texts([text], spec), text_signature(spec, 1))
    return ids, mask


SPEC = TextInput(sequence_length=8, vocabulary_size=100, pad_id=0, prefix=(1,), suffix=(2,), first_word_id=10)


def test_hashed_words_are_deterministic_padded_and_masked() -> None:
    ids, mask = text_tensors("The cat, the CAT", SPEC)
    assert ids.dtype == mask.dtype == np.int64
    assert ids.tolist() == [1, 58, 92, 18, 58, 92, 2, 0]  # crc32 is the same on every machine
    assert mask.tolist() == [1] * 7 + [0]


def test_long_texts_keep_the_suffix_and_xlnet_pads_left() -> None:
    ids, mask = text_tensors("word " * 50, SPEC)
    assert ids[0] == 1
    assert ids[-1] == 2
    assert mask.sum() == 8
    left, left_mask = text_tensors("word", TextInput(6, 100, 5, (), (4, 3), 10, "left"))
    assert left_mask.tolist() == [0, 0, 0, 1, 1, 1]
    assert left.tolist()[:3] == [5, 5, 5]
    assert left.tolist()[-2:] == [4, 3]


@pytest.mark.parametrize("name", ["bert", "bloom_560", "gpt2", "t5", "xlnet"])
def test_every_text_model_gets_identifiers_it_knows(name: str) -> None:
    signature = CATALOGUE[name].signature
    made = preprocess(signature, "Tenuto holds a note for its full value. Très bien!".encode())
    for tensor in signature.inputs:
        array = made[tensor.name]
        assert array.shape == tensor.shape
        assert tensor.below is not None
        assert array.min() >= 0
        assert array.max() < tensor.below


@pytest.mark.parametrize(("body", "message"), [(b"\xff\xfe\x00", "not UTF-8"), (b"   ", "holds no word")])
def test_what_is_no_text_is_refused(body: bytes, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        preprocess(CATALOGUE["bert"].signature, body)


def test_pairs_are_hashed_with_types_and_cut_at_the_end() -> None:
    (pair, cut) = encode_texts([("the cat", "sat"), ("word", "word " * 50)], SPEC)
    first, second = (encode_texts([text], SPEC)[0].ids[1:-1] for text in ("the cat", "sat"))
    assert pair == ([1, *first, 2, *second, 2], [0, 0, 0, 0, 1, 1])
    assert (len(cut.ids), cut.ids[-1], cut.types) == (8, 2, [0, 0, 0, 1, 1, 1, 1, 1])
    (whole,) = encode_texts([("word", "word " * 50)], SPEC, truncate=False)
    assert len(whole.ids) == 54


def tokenizer_file(folder: Path, words: list[str]) -> str:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    tokenizer = Tokenizer(WordLevel({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    path = folder / "tokenizer.json"
    tokenizer.save(str(path))
    return str(path)


def test_a_local_tokenizer_is_used(tmp_path: Path) -> None:
    path = tokenizer_file(tmp_path, ["[UNK]", "hello", "world"])
    ids, mask = text_tensors("hello big world", TextInput(5, 3, 0, tokenizer_path=path))
    assert ids.tolist() == [1, 0, 2, 0, 0]
    assert mask.tolist() == [1, 1, 1, 0, 0]
    ids, _ = text_tensors("hello " * 9, TextInput(5, 3, 0, tokenizer_path=path))
    assert ids.tolist() == [1] * 5
    with pytest.raises(InvalidInputError, match="has token 2; the model knows 0 to 1"):
        preprocess(text_signature(TextInput(5, 2, 0, tokenizer_path=path), 2), b"world")
    with pytest.raises(InvalidInputError, match="cannot be read"):
        text_tensors("world", TextInput(5, 2, 0, tokenizer_path=str(tmp_path / "none.json")))


def test_logits_become_the_most_likely_labels() -> None:
    signature = text_signature(SPEC, 3)
    best = postprocess(signature, {"logits": np.array([0.0, 2.0, 1.0], np.float32)})
    assert [entry["label"] for entry in best] == ["LABEL_1", "LABEL_2", "LABEL_0"]
    assert best[0]["index"] == 1
    assert best[0]["score"] == pytest.approx(np.exp(2) / (1 + np.e + np.exp(2)), abs=1e-6)
    nameless = postprocess(image_signature(ImageInput(8, 8), 3), {"logits": np.array([9e4, 0, -9e4])})
    assert [entry["label"] for entry in nameless] == ["class 0", "class 1", "class 2"]
    assert nameless[0]["score"] == 1.0
