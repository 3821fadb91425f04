"""What cannot be written is told as that, whichever verb prints it."""

from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from tenuto.cli import load_verb, main, verb_names
from tenuto.cli.common import Target

WORKLOAD = "models: [{name: resnet50, rate_rps: 30, slo_ms: 200}]"


@pytest.mark.parametrize(
    "arguments",
    [
        "--help",
        "policies",
        "policies --json",
        "plan w.yaml --gpus v100:1 --policy symphony",
        "plan w.yaml --gpus v100:1 --policy symphony --json",
        "simulate w.yaml --gpus v100:1 --duration-s 1",
    ],
)
def test_a_full_disk_is_no_internal_error(
    arguments: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "w.yaml").write_text(WORKLOAD)
    with open("/dev/full", "w", encoding="utf-8") as full:
        monkeypatch.setattr("sys.stdout", full)
        with pytest.raises(SystemExit) as stop:
            main(arguments.split())
        full.flush()  # as Python does at its end
    assert stop.value.code == 3
    told = capsys.readouterr().err
    assert told.endswith("error: the output cannot be written (No space left on device). Write it elsewhere.\n")


@pytest.mark.parametrize(
    "arguments",
    [
        *(f"fleet plan w.yaml fleet.yaml --policy symphony -o {path}" for path in ("/dev/null/x", "loop", "w.yaml/x")),
        *(f"{command} {'a' * 5000}" for command in ("plan w.yaml --gpus v100:1 --profiles", "fleet observe -o")),
    ],
)
def test_a_path_that_the_system_refuses_is_no_internal_error(
    arguments: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "w.yaml").write_text(WORKLOAD)
    (tmp_path / "fleet.yaml").write_text("cells: [{name: east, nodes: [{name: n0, gpus: [{type: v100, count: 1}]}]}]")
    with pytest.raises(SystemExit) as stop:
        main(arguments.split())
    assert stop.value.code == 2
    assert "cannot be " in capsys.readouterr().err


def options() -> Iterator[tuple[tuple[str, ...], click.Option]]:
    """Every option, and the words before it on a command line."""
    for name in verb_names():
        verb = load_verb(name)
        for below, each in verb.commands.items() if isinstance(verb, click.Group) else [("", verb)]:
            for option in each.params if each is not None else ():
                if isinstance(option, click.Option):
                    yield (*f"{name} {below}".split(), option.opts[0]), option


TARGETS = {words: option for words, option in options() if isinstance(option.type, Target)}


@pytest.mark.parametrize("words", list(TARGETS), ids=" ".join)
def test_what_cannot_be_written_is_refused_before_any_work(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "w.yaml").write_text(WORKLOAD)
    of_files = [] if TARGETS[words].type.dir_okay else ["none/file", "."]
    for path in ("", "w.yaml/x", "loop", "a" * 5000, "/proc/x", *of_files):
        with pytest.raises(SystemExit) as stop:
            main([*words, path])  # what else the verb needs is asked for only then
        (line,) = capsys.readouterr().err.splitlines()
        assert stop.value.code == 2
        assert line.startswith(f"error: {words[-1]}: ")
        assert "cannot be written (" in line


def test_every_option_that_names_what_is_written_is_asked_early() -> None:
    assert {words[-1] for words in TARGETS} >= {"-o", "--page", "--picture", "--folder"}
    assert [words for words, _ in options() if words[-1] == "-o" and words not in TARGETS] == []


@pytest.mark.parametrize(
    "option",
    ["--host \udcff", "--name \udcff", "--offline-path loop", "--tls-key loop", "--keys loop", "--control loop"],
)
def test_an_option_that_names_no_text_or_a_loop_is_no_internal_error(
    option: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "w.yaml").write_text(WORKLOAD)
    with pytest.raises(SystemExit):
        main(["plan", "w.yaml", "--gpus", "v100:1", "--policy", "symphony", "-o", "plan.yaml"])
    with pytest.raises(SystemExit) as stop:
        main(["deploy", "plan.yaml", "--url", "http://127.0.0.1:1", *option.split()])
    assert stop.value.code in (2, 3)
    assert capsys.readouterr().err.splitlines()[-1].startswith("error: ")


def test_another_fault_of_the_system_stays_an_internal_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("tenuto.cli.root.main", fails)
    with pytest.raises(SystemExit):
        main([])
    assert "internal error: OSError" in capsys.readouterr().err
