"""Files whose inputs vary in shape, or that take no batch of any size in front: small ONNX models and programs of
`torch.export` behind the runner. Rows that share a run without padding equal a direct run to the bit."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tenuto.errors import InvalidInputError
from tenuto.profiles.networks.catalogue import SizeRange
from tenuto.profiles.networks.models import build
from tenuto.profiles.networks.programs import Member, load_program
from tenuto.profiles.networks.runner import ProgramRunner

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")
helper, FLOAT, INT64 = onnx.helper, onnx.TensorProto.FLOAT, onnx.TensorProto.INT64
PADDED_WITHIN = 1e-6  # what padding changes in sums of 40 numbers near 1 in float32

Shape = Sequence[int | str | None]
Row = dict[str, Any]


def save(
    folder: Path,
    nodes: Sequence[Any],
    inputs: dict[str, tuple[int, Shape]],
    outputs: dict[str, tuple[int, Shape]],
    **constants: Any,
) -> str:
    """Write an ONNX model and return its path."""
    sides = [[helper.make_tensor_value_info(n, *typed) for n, typed in side.items()] for side in (inputs, outputs)]
    made = [onnx.numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()]
    graph = helper.make_graph(list(nodes), "net", *sides, initializer=made)
    path, opsets = folder / "net.onnx", [helper.make_opsetid(domain, 17) for domain in {"", *(n.domain for n in nodes)}]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=9), path)
    return str(path)


def running_sums(folder: Path, x: Shape = ("batch", "n"), y: Shape = ("batch", "n")) -> str:
    """Each row's sums up to each of its places."""
    node = helper.make_node("CumSum", ["x", "axis"], ["y"])
    return save(folder, [node], {"x": (FLOAT, x)}, {"y": (FLOAT, y)}, axis=np.int64(1))


def encoder(folder: Path) -> str:
    """A text encoder in small: an embedding of each token, and the mean of those that the mask attends."""
    table = np.random.default_rng(1).standard_normal((50, 3), dtype=np.float32)
    nodes = [
        helper.make_node("Gather", ["table", "input_ids"], ["hidden"]),
        helper.make_node("Cast", ["attention_mask"], ["mask"], to=FLOAT),
        helper.make_node("Unsqueeze", ["mask", "last"], ["wide"]),
        helper.make_node("Mul", ["hidden", "wide"], ["seen"]),
        helper.make_node("ReduceSum", ["seen", "tokens_axis"], ["total"], keepdims=0),
        helper.make_node("ReduceSum", ["wide", "tokens_axis"], ["count"], keepdims=0),
        helper.make_node("Div", ["total", "count"], ["pooled"]),
    ]
    ids: Shape = ("batch", "tokens")
    return save(
        folder,
        nodes,
        {"input_ids": (INT64, ids), "attention_mask": (INT64, ids)},
        {"hidden": (FLOAT, ("batch", "tokens", 3)), "pooled": (FLOAT, ("batch", 3))},
        table=table,
        last=np.array([2]),
        tokens_axis=np.array([1]),
    )


@pytest.mark.parametrize("way", ["weights", "constant", "cast", "quantised", "computed", "axis 1"])
def test_indices_of_a_table_are_bounded_by_its_rows(tmp_path: Path, way: str) -> None:
    table = np.zeros((7, 3), np.uint8 if way == "quantised" else np.float32)
    before = {
        "constant": [helper.make_node("Constant", [], ["table"], value=onnx.numpy_helper.from_array(table))],
        "cast": [
            helper.make_node("Cast", ["x"], ["whole"], to=INT64),
            helper.make_node("Unsqueeze", ["whole", "last"], ["i"]),
        ],
        "quantised": [helper.make_node("DequantizeLinear", ["weights", "scale"], ["table"])],
        "computed": [helper.make_node("Mul", ["x", "zero"], ["i"])],
    }.get(way, [])
    indices = "i" if way in ("cast", "computed") else "x"
    axis = 1 if way == "axis 1" else 0
    nodes = [*before, helper.make_node("Gather", ["table", indices], ["y"], axis=axis)]
    weights = {"quantised": {"weights": table, "scale": np.float32(1)}, "constant": {}}.get(way, {"table": table})
    extra = {"cast": {"last": np.array([1])}, "computed": {"zero": np.int64(0)}}.get(way, {})
    made = {"x": (onnx.TensorProto.INT32 if way == "cast" else INT64, ("batch",))}
    source = save(tmp_path, nodes, made, {"y": (FLOAT, [None] * (3 if way == "cast" else 2))}, **weights, **extra)
    (tensor,) = build(source).signature.inputs
    assert tensor.below == (None if way in ("computed", "axis 1") else 7)


def test_an_index_outside_its_table_is_refused_before_it_runs(tmp_path: Path) -> None:
    runner = load(encoder(tmp_path), sizes={"tokens": 9})
    assert [tensor.below for tensor in runner.signatures["m"].inputs] == [50, None]
    row = {"input_ids": np.array([50]), "attention_mask": np.array([1])}
    with pytest.raises(InvalidInputError, match=r"input_ids.*50.*\[0, 50\)"):
        run(runner, [row])


def load(source: str, **options: Any) -> ProgramRunner:
    return load_program([Member("m", source, options=options)], [1, 4])


def run(runner: ProgramRunner, rows: Sequence[Row]) -> list[Row]:
    """Return the outputs of each row of one batch."""
    blocks = {name: [np.asarray(row[name])[None] for row in rows] for name in rows[0]}
    outputs, _ = runner.run_timed({"m": blocks}, {"m": len(rows)})
    parts = [(part, len(next(iter(part.values())))) for part in outputs["m"]]
    return [{name: array[at] for name, array in part.items()} for part, count in parts for at in range(count)]


def directly(source: str) -> Callable[[Row], Row]:
    """Return what runs tensors as they are in ONNX Runtime."""
    session = onnxruntime.InferenceSession(source, providers=["CPUExecutionProvider"])
    names = [each.name for each in session.get_outputs()]
    return lambda row: dict(zip(names, session.run(None, row), strict=True))


def test_only_equal_shapes_share_a_run_and_each_answer_equals_a_direct_run_to_the_bit(tmp_path: Path) -> None:
    source, dice = running_sums(tmp_path), random.Random(3)
    runner, plain = load(source, sizes={"n": 9}), directly(source)
    for _ in range(20):
        rows = [
            {"x": np.random.default_rng(i).random(dice.randint(1, 9), np.float32)} for i in range(dice.randint(1, 8))
        ]
        for row, answer in zip(rows, run(runner, rows), strict=True):
            np.testing.assert_array_equal(answer["y"], plain({"x": row["x"][None]})["y"][0])


def test_rows_that_can_be_padded_share_a_run_and_are_cut_back_to_their_own_size(tmp_path: Path) -> None:
    source, dice = encoder(tmp_path), random.Random(4)
    runner, plain = load(source, sizes={"tokens": {"most": 40, "multiple": 8}}), directly(source)
    calls: list[list[tuple[int, ...]]] = []
    network = type(runner.network)
    ran = network.__call__

    def noting(self: Any, batches: Any) -> Any:
        calls.append([tuple(each.shape) for each in batches["m"]])
        return ran(self, batches)

    for count in (1, 2, 5, 4, 7):
        rows = []
        for _ in range(count):
            tokens = dice.randint(1, 40)
            ids = np.random.default_rng(tokens).integers(0, 50, tokens)
            rows.append({"input_ids": ids, "attention_mask": np.ones(tokens, np.int64)})
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(network, "__call__", noting)
            answers = run(runner, rows)
        longest = -(-max(len(row["input_ids"]) for row in rows) // 8) * 8
        assert calls.pop() == [(count, longest)] * 2
        assert not calls
        for row, answer in zip(rows, answers, strict=True):
            expected = plain({name: array[None] for name, array in row.items()})
            assert answer["hidden"].shape == expected["hidden"][0].shape
            np.testing.assert_array_equal(answer["hidden"], expected["hidden"][0])
            np.testing.assert_allclose(answer["pooled"], expected["pooled"][0], atol=PADDED_WITHIN)


def test_what_may_be_padded_is_padded_beside_sizes_that_must_be_equal(tmp_path: Path) -> None:
    node = helper.make_node("Add", ["x", "z"], ["y"])
    shapes: dict[str, tuple[int, Shape]] = {"x": (FLOAT, ("b", "w", "h")), "z": (FLOAT, ("b", 1, "h"))}
    source = save(tmp_path, [node], shapes, {"y": (FLOAT, ("b", "w", "h"))})
    runner = load(source, sizes={"w": 5, "h": 5}, pad={"x": -1})
    assert runner.signatures["m"].padded_sizes == {"w"}
    dice = random.Random(5)
    sizes = [(dice.randint(1, 5), dice.randint(1, 2)) for _ in range(12)]
    rows = [{"x": np.full((w, h), w + h, np.float32), "z": np.full((1, h), 0.5, np.float32)} for w, h in sizes]
    for row, answer in zip(rows, run(runner, rows), strict=True):
        np.testing.assert_array_equal(answer["y"], row["x"] + row["z"])


@pytest.mark.parametrize("rows", [1, 3, 4, 7])
def test_a_fixed_batch_is_filled_up_and_split(rows: int, tmp_path: Path) -> None:
    source = running_sums(tmp_path, (3, 4), (3, 4))
    runner = load(source)
    assert runner.signatures["m"].batch == 3
    given = [{"x": np.random.default_rng(i).random(4, np.float32)} for i in range(rows)]
    for row, answer in zip(given, run(runner, given), strict=True):
        np.testing.assert_array_equal(answer["y"], np.cumsum(row["x"], dtype=np.float32))


def test_a_network_without_a_batch_runs_each_request_alone_whatever_its_outputs_hold(tmp_path: Path) -> None:
    nodes = [helper.make_node("NonZero", ["x"], ["places"]), helper.make_node("ReduceSum", ["x"], ["sum"], keepdims=0)]
    inputs: dict[str, tuple[int, Shape]] = {"x": (FLOAT, (1, "n")), "unused": (FLOAT, (2,))}
    source = save(tmp_path, nodes, inputs, {"places": (INT64, (2, "found")), "sum": (FLOAT, ())})
    runner = load(source, sizes={"n": 6})
    assert [t.axis for t in runner.signatures["m"].inputs] == [None, None]
    rows = [{"x": np.eye(1, n, n - 1, dtype=np.float32), "unused": np.zeros(2, np.float32)} for n in (3, 6, 1, 3)]
    rows += [{"x": np.zeros((1, 4), np.float32), "unused": np.zeros(2, np.float32)}]
    answers = run(runner, rows)
    assert [answer["places"].tolist() for answer in answers] == [[[0], [n - 1]] for n in (3, 6, 1, 3)] + [[[], []]]
    assert [float(answer["sum"]) for answer in answers] == [1.0, 1.0, 1.0, 1.0, 0.0]


def test_a_state_with_its_batch_elsewhere_and_a_scalar_that_rows_have_in_common(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Mul", ["state", "rate"], ["after"]),
        helper.make_node("ReduceSum", ["x", "axis"], ["y"], keepdims=1),
    ]
    inputs: dict[str, tuple[int, Shape]] = {"x": (FLOAT, ("b", 3)), "state": (FLOAT, (2, "b", 4)), "rate": (FLOAT, ())}
    outputs: dict[str, tuple[int, Shape]] = {"y": (FLOAT, ("b", 1)), "after": (FLOAT, ("unknown", "b", 4))}
    runner = load(save(tmp_path, nodes, inputs, outputs, axis=np.array([1])))
    assert [t.axis for t in runner.signatures["m"].inputs] == [0, 1, None]
    rows = [
        {"x": np.full(3, i, np.float32), "state": np.full((2, 4), i, np.float32), "rate": np.float32(1 + i % 2)}
        for i in range(6)
    ]
    for number, answer in enumerate(run(runner, rows)):
        assert answer["y"].tolist() == [3.0 * number]
        np.testing.assert_array_equal(answer["after"], np.full((2, 4), number * (1.0 + number % 2)))


def test_empty_tensors_are_taken_where_the_least_is_none(tmp_path: Path) -> None:
    runner = load(running_sums(tmp_path), sizes={"n": {"least": 0, "most": 4}})
    answers = run(runner, [{"x": np.zeros(0, np.float32)}, {"x": np.ones(2, np.float32)}])
    assert [answer["y"].tolist() for answer in answers] == [[], [1.0, 2.0]]


def test_dimensions_without_a_name_are_called_by_tensor_and_place_or_as_options_say(tmp_path: Path) -> None:
    source = running_sums(tmp_path, ("unk__1", None), ("unk__2", None))
    with pytest.raises(
        InvalidInputError, match=r"'x_1': can be of any size.*\{sizes: \{x_1: \{most: N\}\}\}.*--sizes x_1=N"
    ):
        build(source)
    signature = build(source, options={"sizes": {"x_1": 7}}).signature
    assert signature.sizes == {"x_1": SizeRange(7)}
    assert [t.whole_shape("n") for t in signature.outputs] == [("n", "y_1")]
    assert not build(source, options={"sizes": {"x_1": 7}}).signature.padded_sizes
    named = {"x": ["batch", "n"], "y": ["batch", "n"]}
    options = {"sizes": {"n": 8}, "pad": {"x": 0}, "shapes": named}
    assert build(source, options=options).signature.padded_sizes == {"n"}
    alone = build(source, options={"sizes": {"rows": 5, "n": 8}, "shapes": {"x": ["rows", "n"]}}).signature
    assert [t.axis for t in (*alone.inputs, *alone.outputs)] == [None, None]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"sizes": {"m": 7}}, "sizes: 'm'.*is not in the file.*n"),
        ({"sizes": {"n": {"least": 3, "most": 2}}}, "least <= most"),
        ({"sizes": {"n": 7}, "pad": {"y": 0}}, "pad: 'y'.*is not in the file"),
        ({"sizes": {"n": 7}, "shapes": {"x": ["batch"]}}, "the file has 2 dimensions"),
        ({"sizes": {"n": 7}, "pad": {"x": 0}, "shapes": {"y": ["batch", "m"]}}, "cannot be cut back.*shapes"),
        ({"sizes": {"n": 7}, "compile": True}, "compile.*no fixed shapes"),
        ({"sizes": {"n": 7}, "pad_batches": True}, "pad_batches.*no fixed shapes"),
        ({"sizes": {"n": 7}, "config": {}}, "takes no config"),
    ],
)
def test_options_that_do_not_fit_the_file_are_refused(options: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match=said):
        load(running_sums(tmp_path), **options)


def test_a_file_that_says_other_outputs_than_it_has_is_told_when_it_is_loaded(tmp_path: Path) -> None:
    node = helper.make_node("Concat", ["x", "x"], ["y"], axis=1)
    source = save(tmp_path, [node], {"x": (FLOAT, ("b", "n"))}, {"y": (FLOAT, ("b", "n"))})
    with pytest.raises(InvalidInputError, match=r"output y.*\[1, 8\].*shapes"):
        load(source, sizes={"n": 4}, pad={"x": 0})


class Masked(torch.nn.Module):
    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x * 2.0, (x * mask).sum(dim=1)


def test_a_program_of_torch_brings_the_ranges_of_its_sizes(tmp_path: Path) -> None:
    batch, n = torch.export.Dim("batch", min=1, max=64), torch.export.Dim("n", min=2, max=30)
    shapes = ({0: batch, 1: n}, {0: batch, 1: n})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.export.export(Masked(), (torch.zeros(3, 5), torch.zeros(3, 5)), dynamic_shapes=shapes)
        torch.export.save(program, tmp_path / "masked.pt2")
        fixed = torch.export.export(Masked(), (torch.zeros(2, 4), torch.zeros(2, 4)))
        torch.export.save(fixed, tmp_path / "fixed.pt2")
    runner = load(str(tmp_path / "masked.pt2"), pad={"x": 0, "mask": 0})
    signature = runner.signatures["m"]
    assert signature.sizes == {"x_1": SizeRange(30, 2)}
    assert signature.padded_sizes == {"x_1"}
    rows = [{"x": np.full(n, n, np.float32), "mask": np.ones(n, np.float32)} for n in (2, 30, 7, 7)]
    for size, answer in zip((2, 30, 7, 7), run(runner, rows), strict=True):
        answers = list(answer.values())
        assert answers[0].tolist() == [2.0 * size] * size
        assert float(answers[1]) == size * size
    runner = load(str(tmp_path / "fixed.pt2"))
    assert runner.signatures["m"].batch == 2
    rows = [{"x": np.full(4, i, np.float32), "mask": np.ones(4, np.float32)} for i in range(3)]
    assert [float(list(answer.values())[1]) for answer in run(runner, rows)] == [0.0, 4.0, 8.0]


def test_a_program_of_torch_may_leave_its_sizes_open(tmp_path: Path) -> None:
    kinds = {"named": torch.export.Dim("n"), "found": torch.export.Dim.AUTO}
    for name, n in kinds.items():
        shapes = ({0: torch.export.Dim("batch"), 1: n},) * 2
        program = torch.export.export(Masked(), (torch.zeros(3, 5), torch.zeros(3, 5)), dynamic_shapes=shapes)
        torch.export.save(program, tmp_path / f"{name}.pt2")
        with pytest.raises(InvalidInputError, match=r"can be of any size|has no largest"):
            load(str(tmp_path / f"{name}.pt2"))
        (size,) = load(str(tmp_path / f"{name}.pt2"), sizes={"x_1": 9}).signatures["m"].sizes.values()
        assert size.most == 9


def test_a_program_of_torch_that_remembers_requests_is_refused(tmp_path: Path) -> None:
    network = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    shapes = ({0: torch.export.Dim("batch", min=2, max=64)},)
    for is_training in (True, False):
        program = torch.export.export(network.train(is_training), (torch.zeros(3, 4),), dynamic_shapes=shapes)
        torch.export.save(program, tmp_path / f"{is_training}.pt2")
    with pytest.raises(InvalidInputError, match=r"1\.num_batches_tracked.*is written in every run"):
        load(str(tmp_path / "True.pt2"))
    load(str(tmp_path / "False.pt2"))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_program_of_torch_runs_in_the_precision_in_which_it_was_saved(tmp_path: Path, dtype: torch.dtype) -> None:
    network = torch.nn.Linear(4, 2, dtype=dtype)
    shapes = ({0: torch.export.Dim("batch", min=1, max=64)},)
    program = torch.export.export(network, (torch.zeros(3, 4, dtype=dtype),), dynamic_shapes=shapes)
    torch.export.save(program, tmp_path / "half.pt2")
    runner = load(str(tmp_path / "half.pt2"))
    (taken,) = runner.signatures["m"].inputs
    (answer,) = run(runner, [{taken.name: np.ones(4, taken.dtype)}])
    expected = network(torch.ones(1, 4, dtype=dtype)).float().detach().numpy()[0]
    assert [each.tolist() for each in answer.values()] == [pytest.approx(expected, rel=0.01)]


def test_what_onnx_runtime_does_not_take_is_refused_with_what_helps(tmp_path: Path) -> None:
    one: dict[str, tuple[int, Shape]] = {"x": (FLOAT, ("b", 2))}
    given: dict[str, tuple[int, Shape]] = {"y": (FLOAT, ("b", 2))}
    for domain in ("", "my.own"):
        source = save(tmp_path, [helper.make_node("Frobnicate", ["x"], ["y"], domain=domain)], one, given)
        with pytest.raises(InvalidInputError, match="an operator that this ONNX Runtime lacks"):
            build(source)
    source = save(tmp_path, [helper.make_node("Add", ["x", "w"], ["y"])], one, given, w=np.ones(2, np.float32))
    model = onnx.load(source)
    model.opset_import[0].version = 99
    onnx.save(model, source)
    with pytest.raises(InvalidInputError, match="Export it with an older opset"):
        build(source)
    model.opset_import[0].version, model.ir_version = 17, 99
    onnx.save(model, source)
    with pytest.raises(InvalidInputError, match="Export it with an older onnx"):
        build(source)
    model.ir_version = 9
    onnx.save(model, source, save_as_external_data=True, location="weights.bin", size_threshold=0)
    assert build(source).signature.inputs[0].shape == (2,)
    files = [Path(source), tmp_path / "weights.bin"]
    assert load(source).network.weights_mib == sum(file.stat().st_size for file in files) / 2**20
    (tmp_path / "weights.bin").unlink()
    with pytest.raises(InvalidInputError, match="Its weights lie in files of their own"):
        build(source)


def test_a_quantised_network_gives_what_a_direct_run_gives(tmp_path: Path) -> None:
    """Weights and activations in int8, as ONNX Runtime's own tools write them (QDQ)."""
    weights = np.random.default_rng(0).integers(-128, 128, (4, 3)).astype(np.int8)
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "step", "zero"], ["x8"]),
        helper.make_node("DequantizeLinear", ["x8", "step", "zero"], ["xq"]),
        helper.make_node("DequantizeLinear", ["w8", "step", "zero"], ["wq"]),
        helper.make_node("MatMul", ["xq", "wq"], ["product"]),
        helper.make_node("QuantizeLinear", ["product", "step", "zero"], ["y8"]),
        helper.make_node("DequantizeLinear", ["y8", "step", "zero"], ["y"]),
    ]
    shapes: dict[str, tuple[int, Shape]] = {"x": (FLOAT, ("batch", "n", 4))}
    made: dict[str, tuple[int, Shape]] = {"y": (FLOAT, ("batch", "n", 3))}
    step, zero = np.float32(0.02), np.int8(3)
    source = save(tmp_path, nodes, shapes, made, w8=weights, step=step, zero=zero)
    runner, plain = load(source, sizes={"n": 8}, pad={"x": 0}), directly(source)
    rows = [{"x": np.random.default_rng(n).standard_normal((n, 4), dtype=np.float32)} for n in (1, 8, 3, 8)]
    for row, answer in zip(rows, run(runner, rows), strict=True):
        assert (answer["y"] != 0).any()
        np.testing.assert_array_equal(answer["y"], plain({"x": row["x"][None]})["y"][0])


def test_texts_vary_in_number_too(tmp_path: Path) -> None:
    """Strings cannot be padded, so requests with equally many share a run."""
    text = onnx.TensorProto.STRING
    shape: Shape = ("batch", "words")
    source = save(tmp_path, [helper.make_node("Identity", ["x"], ["y"])], {"x": (text, shape)}, {"y": (text, shape)})
    runner = load(source, sizes={"words": 4})
    rows = [{"x": np.array([b"%d" % word for word in range(count)], object)} for count in (3, 1, 4, 3)]
    assert [answer["y"].tolist() for answer in run(runner, rows)] == [row["x"].tolist() for row in rows]
