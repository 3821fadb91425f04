"""Files of an earlier version are read for as long as docs/reference/files.md promises, those of a later one not."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tenuto.documents import SCHEMA, StrictModel, load_document
from tenuto.errors import InvalidInputError
from tenuto.loadgen.run import load_run
from tenuto.placement import Cluster, Plan
from tenuto.profiles import Profile

FORMATS = Path(__file__).parent / "data" / "formats"
NUMBERS = sorted(int(folder.name) for folder in FORMATS.iterdir())
READERS: dict[str, type[StrictModel]] = {"cluster.yaml": Cluster, "plan.json": Plan, "profile.yaml": Profile}


def test_there_are_files_of_this_number_and_of_the_one_before() -> None:
    assert {SCHEMA, max(1, SCHEMA - 1)} <= set(NUMBERS)


@pytest.mark.parametrize("number", NUMBERS)
def test_earlier_files_are_read(number: int) -> None:
    folder = FORMATS / str(number)
    cluster, plan, profile = (READERS[name].load(folder / name) for name in sorted(READERS))
    assert isinstance(cluster, Cluster)
    assert isinstance(plan, Plan)
    assert isinstance(profile, Profile)
    assert [gpu.id for gpu in cluster.gpus] == ["n0/0", "n0/1"]
    assert {name: [g.gpu for g in plan.hosts_of(name)] for name in ("resnet50", "vgg19")} == {
        "resnet50": ["n0/1"],
        "vgg19": ["n0/0"],
    }
    assert plan == Plan.load(folder / "serve-config.yaml")
    assert [(point.batch_size, point.latency_ms) for point in profile.models["resnet50"].points] == [
        (1, 6.0),
        (8, 20.0),
    ]
    run = load_run(folder / "run")
    assert run.plan == plan
    assert len(run.records.within(0.0, 1000.0)) == 153
    assert {name: figures["offered"] for name, figures in run.document["models"].items()} == {
        "resnet50": 106,
        "vgg19": 39,
    }


@pytest.mark.parametrize("name", READERS)
def test_what_is_written_is_of_this_number(name: str) -> None:
    found = READERS[name].load(FORMATS / str(SCHEMA) / name)
    assert load_document(FORMATS / str(SCHEMA) / name)["schema"] == SCHEMA
    assert f"schema: {SCHEMA}\n" in found.dump()  # type: ignore[attr-defined]


def _later(document: dict[str, object]) -> None:
    document["schema"] = SCHEMA + 1


def _with_a_new_key(document: dict[str, object]) -> None:
    document["invented_later"] = 1


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize(
    ("change", "said"), [(_later, f"schema {SCHEMA + 1} is not supported"), (_with_a_new_key, "invented_later")]
)
def test_files_of_a_later_version_are_refused(
    name: str, change: Callable[[dict[str, object]], None], said: str, tmp_path: Path
) -> None:
    document = load_document(FORMATS / str(SCHEMA) / name)
    change(document)
    (tmp_path / "file.json").write_text(json.dumps(document))
    with pytest.raises(InvalidInputError, match=said):
        READERS[name].load(tmp_path / "file.json")


def test_results_of_a_later_version_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(FORMATS / str(SCHEMA) / "run", folder)
    result = json.loads((folder / "result.json").read_text())
    (folder / "result.json").write_text(json.dumps({**result, "schema": SCHEMA + 1}))
    with pytest.raises(InvalidInputError, match=f"is of schema {SCHEMA + 1}"):
        load_run(folder)
