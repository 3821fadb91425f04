"""`tenuto key` makes entries that the key file takes, and never writes a key into it."""

from pathlib import Path

import pytest

from tenuto.cli import main
from tenuto.deployments.security.keys import Callers, KeyEntry, read_keys


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    return int(ended.value.code or 0)


def test_what_it_prints_is_an_entry_of_the_key_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run("key", "mobile-app", "--model", "resnet*", "--rate-rps", "200") == 0
    out, err = capsys.readouterr()
    key = err.split()[-1]
    assert key not in out
    file = tmp_path / "keys.yaml"
    file.write_text("keys:\n" + out)
    (entry,) = read_keys(file)
    assert (entry.name, entry.models, entry.rate_rps) == ("mobile-app", ("resnet*",), 200.0)
    assert Callers([entry]).find(key.encode()) is not None


def test_every_field_of_an_entry_can_be_given(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    given = ["--model", "resnet*", "--rate-rps", "200", "--burst", "7", "--tokens-per-s", "9", "--offline"]
    assert run("key", "batches", *given) == 0
    file = tmp_path / "keys.yaml"
    file.write_text("keys:\n" + capsys.readouterr().out)
    (entry,) = read_keys(file)
    assert entry.model_dump(exclude_defaults=True).keys() == KeyEntry.model_fields.keys()


def test_a_name_that_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("key", "two words") == 2
    assert "is not a client's name" in capsys.readouterr().err
    assert run("key", "app", "--model", "") == 2
    assert "--model: '': names no model." in capsys.readouterr().err
