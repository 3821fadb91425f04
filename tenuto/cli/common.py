"""Functions for several verbs: to read cluster and profile arguments, and to print data and progress."""

from __future__ import annotations

import functools
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

import click
from rich.console import Console
from rich.segment import Segment

from tenuto.documents import check_target, unwritable, write_whole
from tenuto.errors import one_of, printable, refused
from tenuto.files import parse_number
from tenuto.placement import Cluster, Plan
from tenuto.placement.cluster import Gpu
from tenuto.profiles import Profile, Profiles

Verb = Callable[..., Any]
T = TypeVar("T")

# Derived: memory of a GPU of a type that is known by a profile alone which does not say it. Nothing that is counted in
# MiB fits; what generates is counted in the tokens of its profile.
_NO_MIB = 1.0
_WIDEST = 10_000  # format: characters of a line of a table that goes to a file
_AS_JSON = "tenuto.cli.as_json"  # key in the context of the verb that runs


def _remember(context: click.Context, _: click.Parameter, value: bool) -> None:
    context.meta[_AS_JSON] = value


json_option = click.option("--json", is_flag=True, expose_value=False, callback=_remember, help="Print JSON.")


class Target(click.Path):
    """A path that a verb writes at its end. One that cannot be written is refused before the verb begins."""

    def __init__(self, *, is_folder: bool = False) -> None:
        """Take a file, or with `is_folder` a folder of files."""
        super().__init__(dir_okay=is_folder, file_okay=not is_folder)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:  # noqa: ARG002
        """Return the path; raises `InvalidInputError` if nothing can be written there."""
        try:
            check_target(value, is_folder=self.dir_okay)
        except OSError as error:
            raise unwritable(param.opts[0] if param else "-o", value, error) from error
        return value


def output_option(help: str, *, is_folder: bool = False, required: bool = False) -> Callable[[Verb], Verb]:
    """Return the option -o of a verb that writes one file, or a folder of files."""
    name, metavar = ("folder", "DIR") if is_folder else ("output", "FILE")
    kind = Target(is_folder=is_folder)
    return click.option("-o", "--output", name, type=kind, required=required, metavar=metavar, help=help)


class _Console(Console):
    """Shows what other machines and files say, and obeys none of it: a text cannot move the cursor."""

    def render(self, renderable: Any, options: Any = None) -> Iterator[Segment]:
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else printable(text, None), style, control)

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError  # `main` handles this; rich itself would exit with 1


@functools.cache  # there is one console, so that other output goes above the line of progress
def progress_console() -> Console:
    """Return the console for progress and notices, on stderr."""
    return _Console(stderr=True, highlight=False)


def stdout_console() -> Console:
    """Return the console for results. When its output goes to a file or a pipe, lines are as wide as they need."""
    return _Console(highlight=False, width=None if sys.stdout.isatty() else _WIDEST)


def say(text: str) -> None:
    """Print one line of results on stdout, without formatting."""
    stdout_console().print(text, markup=False, soft_wrap=True)


def notice(text: str) -> None:
    """Print one line on stderr, without formatting."""
    progress_console().print(text, markup=False, soft_wrap=True)


def tell(text: str) -> None:
    """Print one line of progress on stderr; do nothing if stderr is closed."""
    try:
        notice(f"tenuto: {text}")
    except BrokenPipeError:  # the work goes on
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


def command_line() -> list[str]:
    """Return the command line of this process, which is noted in result files."""
    return ["tenuto", *sys.argv[1:]]


def write_file(path: str, text: str, *, option: str = "-o", what: str = "") -> None:
    """Write a file that `option` asked for. Print on stderr its path, and `what` is in it.

    Raises:
        InvalidInputError: the file cannot be written.
    """
    try:
        write_whole(path, text)
    except OSError as error:
        raise unwritable(option, path, error) from error
    notice(f"wrote {path}{what and f': {what}'}")


def wants_json() -> bool:
    """Return whether --json is given to the verb that runs."""
    return bool(click.get_current_context().meta.get(_AS_JSON))


def printed_as_json(data: Any) -> bool:
    """With --json, print a verb's result as one JSON document on stdout. Return whether --json is given.

    Keys keep their order. The data may contain everything that `msgspec` knows, such as structs and dataclasses.
    """
    if not wants_json():
        return False
    import msgspec

    json.dump(data, sys.stdout, indent=2, allow_nan=False, default=msgspec.to_builtins)
    sys.stdout.write("\n")
    return True


class Numbers(click.ParamType):  # type: ignore[type-arg]  # which has one from click 8.2 on only
    """Numbers separated by commas. The value has them in ascending order without repetitions."""

    name = "numbers"

    def __init__(self, kind: type[int] | type[float], least: float = -math.inf, most: float = math.inf) -> None:
        """Take numbers of type `kind`, none below `least` or above `most`."""
        self._kind, self._least, self._most = kind, least, most

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[float, ...]:
        """Read a text. If it is wrong, a usage error says what it must be."""
        try:
            numbers = tuple(sorted({self._kind(part) for part in value.split(",")}))
        except ValueError:
            numbers = ()
        if not numbers or not self._least <= numbers[0] <= numbers[-1] <= self._most:
            kind = "whole numbers" if self._kind is int else "numbers"
            least = f", at least {self._least:g}" if self._least > -math.inf else ""
            most = f", at most {self._most:g}" if self._most < math.inf else ""
            self.fail(f"{value!r}: must be {kind} separated by commas{least}{most}.", param, ctx)
        return numbers


class Number(click.types.FloatParamType):
    """A number as in files: neither `nan` nor infinite, nor so small that dividing by it is."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Read a text. If it is wrong, a usage error says what it must be."""
        try:
            if isinstance(value, str):
                parse_number(value)
        except ValueError as error:
            self.fail(f"{value!r} {error}.", param, ctx)
        return super().convert(value, param, ctx)


class NumberRange(Number, click.FloatRange):
    """A `Number` within bounds."""


class ProgressLine:
    """Progress on stderr. On a terminal it is one line that is refreshed; elsewhere plain lines, always with the
    last."""

    def __init__(self, *, every_s: float = 0.0) -> None:
        """`every_s`: the least time between two plain lines."""
        self._is_terminal = sys.stderr.isatty()
        self._every_s = every_s
        self._next_at = 0.0

    def show(self, text: str, *, is_last: bool = False) -> None:
        """Show a line instead of the one before."""
        now, text = time.monotonic(), printable(text, None)
        if not (self._is_terminal or is_last) and now < self._next_at:
            return
        self._next_at = now + self._every_s
        sys.stderr.write(f"\r\x1b[2K{text}" if self._is_terminal else f"{text}\n")
        sys.stderr.flush()

    def clear(self) -> None:
        """Remove the refreshed line, so that results can follow."""
        if self._is_terminal:
            sys.stderr.write("\r\x1b[2K")


def with_options(verb: Verb, *options: Callable[[Verb], Verb]) -> Verb:
    """Return a verb with these options, in this order."""
    for option in reversed(options):
        verb = option(verb)
    return verb


def headed(heading: str, *options: Callable[[Verb], Verb]) -> Callable[[Verb], Verb]:
    """Return a decorator that adds options to a verb. `GroupedVerb` shows them below this heading."""

    def decorate(function: Verb) -> Verb:
        before = len(getattr(function, "__click_params__", ()))
        function = with_options(function, *options)
        for added in function.__click_params__[before:]:  # type: ignore[attr-defined]
            added.heading = heading
        return function

    return decorate


class GroupedVerb(click.Command):
    """A verb whose help shows its options below their headings."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options; those without a heading come last."""
        rows: dict[str, list[tuple[str, str]]] = {}
        for option in self.get_params(ctx):
            if isinstance(option, click.Option) and (row := option.get_help_record(ctx)) is not None:
                rows.setdefault(getattr(option, "heading", "Others"), []).append(row)
        for heading, shown in rows.items():
            with formatter.section(heading):
                formatter.write_dl(shown)


def gathered(kind: type[T], name: str, *options: Callable[[Verb], Verb]) -> Callable[[Verb], Verb]:
    """Return a decorator that adds options to a verb. The verb gets their values as one `kind` in argument `name`.

    The options have the names of the fields of `kind`, a dataclass. Options that a verb adds itself are not gathered.
    """

    def decorate(function: Verb) -> Verb:
        @functools.wraps(function)
        def gathering(*args: Any, **given: Any) -> Any:
            values = {field.name: given.pop(field.name) for field in fields(kind) if field.name in given}  # type: ignore[arg-type]
            return function(*args, **{name: kind(**values)}, **given)

        return with_options(gathering, *options)

    return decorate


@dataclass(frozen=True)
class ClusterArguments:
    """The cluster and the profiles of a verb: --gpus, --cluster, --elastic and --profiles."""

    gpus: str | None = None
    cluster_file: str | None = None
    elastic: bool = False
    profile_names: tuple[str, ...] = ()

    @property
    def names_a_cluster(self) -> bool:
        """Whether one of --gpus and --cluster is given."""
        return self.gpus is not None or self.cluster_file is not None

    def cluster(self) -> Cluster:
        """Return the cluster; raises `InvalidInputError` when neither or both are given."""
        if (self.gpus is None) == (self.cluster_file is None):
            raise refused(
                "--gpus", self.gpus, "give exactly one of --gpus and --cluster", "Write for example --gpus v100:4."
            )
        if self.gpus is not None:
            return Cluster.parse(self.gpus, elastic=self.elastic, memory_mib=self._memory_mib())
        cluster = Cluster.load(str(self.cluster_file))
        return cluster.model_copy(update={"elastic": True}) if self.elastic else cluster

    def _memory_mib(self) -> dict[str, float]:
        """Return the memory of the GPU types that profile files name, for types that are not known by name."""
        files = [Profile.load(name) for name in self.profile_names if Path(name).exists()]
        return {file.gpu_type: file.memory_mib or _NO_MIB for file in reversed(files)}

    def ground(self, plan: Plan) -> tuple[Profiles, tuple[Gpu, ...]]:
        """Return the profiles and GPUs that a controller may plan with: those of the cluster, else those of the
        plan."""
        from tenuto.placement.planner.gpu_matching import gpus_of

        gpus = self.cluster().gpus if self.names_a_cluster else gpus_of(plan)
        return self.profiles(dict.fromkeys(gpu.type for gpu in gpus)), gpus

    def profiles(self, gpu_types: Iterable[str]) -> Profiles:
        """Return the profiles for GPU types; see `profiles_from`."""
        return profiles_from(self.profile_names, gpu_types)


def profiles_option(default: str) -> Callable[[Verb], Verb]:
    """Return the option --profiles; `default` says which profiles are taken without it."""
    help = f"Profile file or shipped profile; repeatable, earlier ones win. Default: {default}."
    return click.option("--profiles", "profile_names", multiple=True, metavar="FILE|NAME", help=help)


cluster_arguments = gathered(
    ClusterArguments,
    "where",
    click.option("--gpus", metavar="TYPE:COUNT[,…]", help="GPUs of one node, in short form, such as v100:4."),
    click.option("--cluster", "cluster_file", metavar="FILE", help="Cluster file instead of --gpus."),
    click.option("--elastic", is_flag=True, help="Use as many GPUs of these types as needed, at the lowest cost."),
    profiles_option("shipped ones for the GPU types"),
)


def profiles_from(names: Iterable[str], gpu_types: Iterable[str]) -> Profiles:
    """Load profiles given by file or shipped name; without any, the shipped defaults of the GPU types.

    Raises:
        InvalidInputError: neither a file nor a shipped profile; the message lists the shipped ones.
    """
    from tenuto.profiles.shipped import default_profiles, load_shipped, shipped_names

    loaded: list[Profile] = []
    for name in names:
        if name in shipped_names():
            loaded.append(load_shipped(name))
        elif Path(name).exists():
            loaded.append(Profile.load(name))
        else:
            cure = one_of(name, shipped_names(), "Shipped profiles:")
            raise refused("--profiles", name, "neither a file nor a shipped profile", cure)
    if not loaded:
        for gpu_type in gpu_types:
            loaded += default_profiles(gpu_type)
    return Profiles(loaded)


def named_values(where: str, texts: Iterable[str], example: str = "tuned=resnet50") -> dict[str, str]:
    """Return texts of the form NAME=VALUE as a mapping.

    Args:
        where: the option or argument, for errors.
        texts: as they were given.
        example: of one.

    Raises:
        InvalidInputError: one has another form, or a name is given twice.
    """
    by_name: dict[str, str] = {}
    for text in texts:
        name, separator, value = text.partition("=")
        if not (name and separator and value):
            raise refused(where, text, "must read NAME=VALUE", f"Write for example {example}.")
        if name in by_name:
            raise refused(where, name, "is given twice", "Give each name once: base=…, tuned=….")
        by_name[name] = value
    return by_name
