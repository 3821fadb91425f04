"""What the command line says of itself is so: verbs, options and names are suggested, defaults are those that count."""

import contextlib
from collections.abc import Iterator
from typing import Any

import click
import pytest

from tenuto.cli import load_verb, main, verb_names
from tenuto.deployments.serve.deployment import Deployment
from tenuto.errors import InvalidInputError, one_of
from tenuto.loadgen.bench import BenchOptions
from tenuto.placement import Cluster
from tenuto.placement.policy import policy_names
from tenuto.profiles.gpu_types import GPU_TYPES
from tenuto.profiles.measuring.measure import MeasureRequest
from tenuto.profiles.networks.catalogue import CATALOGUE, lookup
from tenuto.profiles.shipped import load_shipped, shipped_names


def commands() -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Every verb, and those below verbs."""
    for name in verb_names():
        verb = load_verb(name)
        assert verb is not None
        below = verb.commands.items() if isinstance(verb, click.Group) else ()
        yield from (((name, each), command) for each, command in below)
        yield (name,), verb


COMMANDS = dict(commands())


def misspelt(name: str) -> str:
    """The name without its second letter, dashes in front apart."""
    dashes = len(name) - len(name.lstrip("-"))
    return name[: dashes + 1] + name[dashes + 2 :]


def told(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    with pytest.raises(SystemExit) as left:
        main(list(args))
    assert left.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "1e999", "1e-320", "1_000"])
def test_a_number_of_an_option_is_one_that_files_may_have(value: str) -> None:
    wrong = []
    for words, command in COMMANDS.items():
        for option in command.params:
            if isinstance(option.type, click.types.FloatParamType):
                with contextlib.suppress(click.BadParameter):
                    wrong.append((words, option.name, option.type.convert(value, None, None)))
    assert wrong == []


def test_every_verb_is_in_the_help_once(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    lines = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line.startswith("  ") and line.strip()]
    assert [lines.count(name) for name in verb_names()] == [1] * len(verb_names())


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_a_misspelt_verb_is_suggested(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert f"'{words[-1]}'" in told(capsys, *words[:-1], misspelt(words[-1])).partition("Did you mean")[2]


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_a_misspelt_option_is_suggested(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    names = [name for option in COMMANDS[words].params for name in option.opts if name.startswith("--")]
    for name in names:
        assert name in told(capsys, *words, misspelt(name))


def test_misspelt_names_are_suggested() -> None:
    for name in policy_names():
        assert f"'{name}'" in one_of(misspelt(name), policy_names())
    for known, read in (
        (shipped_names(), load_shipped),
        (CATALOGUE, lookup),
        ([entry.source for entry in CATALOGUE.values()], lookup),
        ([name for name in GPU_TYPES if len(name) > 3], lambda name: Cluster.parse(f"{name}:1")),
    ):
        for name in known:
            for wrong in (misspelt(name), f"{name}x", name.upper() + "X"):
                with pytest.raises(InvalidInputError, match="Did you mean '"):
                    read(wrong)


@pytest.mark.parametrize(
    ("verb", "kind"),
    [("serve", Deployment), ("deploy", Deployment), ("bench", BenchOptions), ("profile", MeasureRequest)],
)
def test_the_defaults_of_the_help_are_those_of_what_is_asked_for(verb: str, kind: Any) -> None:
    """Where the help shows words, what counts says nothing, or what the words say."""
    fields = kind.model_fields if hasattr(kind, "model_fields") else kind.__dataclass_fields__
    command, given = COMMANDS[(verb,)], defaults((verb,))
    words = {option.name for option in command.params if isinstance(getattr(option, "show_default", None), str)}
    compared = {name: (given[name], fields[name].default) for name in given.keys() & fields.keys() - words}
    known = {name: pair for name, pair in compared.items() if isinstance(pair[1], int | float | str | None)}
    assert len(known) >= 4
    assert {
        name: pair for name, pair in known.items() if pair[0] != pair[1] and (pair[0], pair[1]) != (None, "auto")
    } == {}


def defaults(words: tuple[str, ...]) -> dict[str, Any]:
    """What a verb is called with where nothing is given."""
    return COMMANDS[words].make_context(words[-1], [], resilient_parsing=True).params


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_completes_verbs_and_options(
    shell: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def completed(words: str) -> str:
        monkeypatch.setenv("_TENUTO_COMPLETE", f"{shell}_complete")
        monkeypatch.setenv("COMP_WORDS", f"tenuto {words}")
        monkeypatch.setenv("COMP_CWORD", words.split()[-1] if shell == "fish" else str(len(words.split())))
        with pytest.raises(SystemExit):
            main()
        return capfd.readouterr().out

    assert "policies" in completed("pol")
    assert "--rate-scale" in completed("bench --rate")
    monkeypatch.setenv("_TENUTO_COMPLETE", f"{shell}_source")
    with pytest.raises(SystemExit):
        main()
    assert "_TENUTO_COMPLETE" in capfd.readouterr().out
