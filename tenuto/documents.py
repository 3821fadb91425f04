"""Reads YAML and JSON documents into strict models and reports all faults at once, each with its cure. Writes a file
whole or not at all.

All files of Tenuto (profiles, workloads, clusters, plans) are read here, so an unknown key or a wrong unit gives the
same message everywhere. `write_whole` writes every file that a user may keep.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Self, TypeVar

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, GetCoreSchemaHandler, ValidationError
from pydantic_core import CoreSchema

from tenuto.errors import InvalidInputError, Problem, one_of, refused
from tenuto.files import is_plain_text, parse_json, parse_yaml, read_text
from tenuto.options import split_pairs

# libyaml's classes are ten times as fast; every wheel of PyYAML has them.
_SafeDumper: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)

# YAML that was cut at the end of a line is still YAML. So the files that we write say where they end.
_FIRST_LINE = "# Written by tenuto; it is whole only with its last line.\n"
_LAST_LINE = "# end\n"


class _Dumper(_SafeDumper):  # type: ignore[misc]
    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002
        return True


def _text(dumper: Any, text: str) -> Any:
    # PyYAML quotes what YAML 1.1 reads otherwise, and our reader reads 1.2.
    style = "|" if "\n" in text else None if is_plain_text(text) else "'"
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)  # lines stay lines


_MOST_PROBLEMS = 100  # limit: problems that one error lists
_MOST_DETAILED = 10_000  # limit: problems whose values are looked at; half a million with values take 1 GiB


def _make_numbers_strict(schema: Any) -> None:
    if isinstance(schema, dict):
        if schema.get("type") in ("int", "float"):
            schema["strict"] = True
        for name, part in schema.items():
            if name != "keys_schema":  # JSON has texts as keys only
                _make_numbers_strict(part)
    elif isinstance(schema, list | tuple):
        for part in schema:
            _make_numbers_strict(part)


class StrictModel(BaseModel):
    """Base of every file schema: frozen, comparable, unknown keys are errors (a typo must fail, not be ignored). A
    number is a number: neither `true` nor a text."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, defer_build=True)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: type[BaseModel], handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = handler(source)
        _make_numbers_strict(schema)
        return schema

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read and validate a YAML or JSON file; raises `InvalidInputError` with every problem found."""
        return parse_document(cls, load_document(path), origin=str(path))


ModelT = TypeVar("ModelT", bound=BaseModel)


class ProblemsBelow(ValueError):
    """A schema's validator raises this when it finds problems at several places below it, each with its own cure."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        """`problems`: their paths are relative to the schema."""
        super().__init__(" ".join(str(problem) for problem in problems))
        self.problems = tuple(problems)


class Fault(ValueError):
    """A schema's validator raises this when a rule is broken: the rule, and the cure."""

    def __init__(self, rule: str, cure: str) -> None:
        super().__init__(f"{rule}. {cure}")
        self.rule, self.cure = rule, cure


SCHEMA = 1  # format: of plans, profiles, clusters and results; docs/reference/files.md says what a later version reads


def _is_known(version: int) -> int:
    if version != SCHEMA:
        raise Fault(
            f"schema {version} is not supported by this version, which reads schema {SCHEMA}",
            "Make the file again with this version, or read it with the version of Tenuto that wrote it.",
        )
    return version


SchemaVersion = Annotated[int, Field(alias="schema"), AfterValidator(_is_known)]


# pydantic's error types, with what a user should do about each.
_CURES = {
    "missing": "Add this key.",
    "greater_than": "Give a larger number.",
    "greater_than_equal": "Give a larger number.",
    "less_than": "Give a smaller number.",
    "less_than_equal": "Give a smaller number.",
    "finite_number": "Give a finite number.",
    "float_parsing": "Give a number without a unit; the unit is in the key.",
    "float_type": "Give a number without a unit; the unit is in the key.",
    "int_parsing": "Give a whole number.",
    "int_type": "Give a whole number.",
    "int_from_float": "Give a whole number.",
    "string_pattern_mismatch": "Use letters, digits, '.', '_' and '-' only, starting with a letter or digit.",
    "literal_error": "Use one of the values listed.",
    "union_tag_invalid": "Use one of the values listed.",
    "too_short": "Give at least one entry.",
    "too_long": "Leave out entries, or split the file.",
    "model_type": "Give a mapping of keys to values.",
    "list_type": "Give a list.",
    "tuple_type": "Give a list.",
    "dict_type": "Give a mapping of keys to values.",
}


def load_document(path: str | Path) -> Any:
    """Parse a YAML or JSON file. For a RayService of Kubernetes, return the Serve config in it.

    Raises:
        InvalidInputError: the file is absent, unreadable, cut, not YAML, or breaks a bound of `tenuto.files`; the
            message names the line.
    """
    file = Path(path)
    text = read_text(file)
    if text.startswith(_FIRST_LINE) and not f"{text.rstrip()}\n".endswith(f"\n{_LAST_LINE}"):
        raise InvalidInputError(
            f"{file}: the file is cut: its last line is not `{_LAST_LINE.strip()}`. Write it again, or remove its "
            "first line if you made it so."
        )
    data = (parse_json if file.suffix == ".json" else parse_yaml)(text, str(file))
    if isinstance(data, dict) and data.get("kind") == "RayService":
        spec = data.get("spec")
        config = spec.get("serveConfigV2") if isinstance(spec, dict) else None
        if not isinstance(config, str) or not config:
            cure = "`tenuto plan … --format rayservice -o FILE` writes it."
            raise refused(f"{file}: spec.serveConfigV2", None, "is missing, or no text", cure)
        return parse_yaml(config, f"{file}: spec.serveConfigV2")
    return data


def repeated(values: Iterable[str]) -> list[str]:
    """Return the values that come more than once, in order."""
    return sorted(value for value, count in Counter(values).items() if count > 1)


def parse_pairs(pairs: Iterable[str]) -> dict[str, Any]:
    """Return repeated `key=value` texts by key, each value read as YAML; see `split_pairs` for the errors."""
    return {key: parse_yaml(text, f"--option {key}") for key, text in split_pairs(pairs).items()}


def parse_document(model: type[ModelT], data: Any, *, origin: str = "") -> ModelT:
    """Validate `data` against `model`.

    Args:
        model: the schema.
        data: plain Python data as read from a file.
        origin: prefix of the paths in error messages, such as a file name.

    Raises:
        InvalidInputError: with one `Problem` for every fault.
    """
    if data is None or not isinstance(data, (dict, BaseModel)):
        where = origin or model.__name__
        raise refused(
            where, data, "must be a mapping of keys to values", "See the file formats in docs/reference/files.md."
        )
    try:
        return model.model_validate(data)
    except ValidationError as error:
        problems: list[Problem | str] = list(islice(_problems(error, model, origin), _MOST_PROBLEMS))
        if error.error_count() > _MOST_PROBLEMS:
            problems.append(
                f"{origin or model.__name__}: {error.error_count()} problems, of which these are the first."
            )
        raise InvalidInputError(problems) from error


def _problems(error: ValidationError, model: type[BaseModel], origin: str) -> Iterable[Problem]:
    prefix = f"{origin}: " if origin else ""
    is_short = error.error_count() <= _MOST_DETAILED
    schema: dict[str, Any] = {}
    for fault in error.errors(include_url=False, include_context=is_short, include_input=is_short):
        context = fault.get("ctx", {})
        if is_short and fault["type"] == "too_short" and len(fault["input"]) >= context["min_length"]:
            continue  # pydantic counts only entries without a fault, and names those with one, too
        inner = context.get("error")
        # A part in parentheses names the form of a value (see LatencyField); it is no key of the file.
        unknown = fault["loc"][-1:] if fault["type"] == "extra_forbidden" else ()
        forms = fault["loc"][: -len(unknown) or None]
        location = (*(part for part in forms if not str(part).startswith("(")), *unknown)
        path = (prefix + ".".join(str(part) for part in location)).removesuffix(": ") or model.__name__
        if isinstance(inner, ProblemsBelow):
            above = "".join(f"{part}." for part in location)
            yield from (replace(problem, path=f"{prefix}{above}{problem.path}") for problem in inner.problems)
            continue
        if fault["type"] == "extra_forbidden":
            schema = schema or model.model_json_schema(by_alias=True)
            known = _known_keys(schema, location[:-1])
            yield Problem(path, fault.get("input"), "unknown key", _suggest(str(location[-1]), known))
        else:
            text = str(fault["msg"])
            rule, cure = text[:1].lower() + text[1:], _CURES.get(fault["type"], "Correct the value.")
            if isinstance(inner, Fault):
                rule, cure = inner.rule, inner.cure
            elif isinstance(inner, ValueError):
                rule = str(inner)
            # For a missing key, and for the whole document, pydantic gives the mapping around it, which tells nothing.
            shown = fault.get("input") if location and fault["type"] != "missing" else None
            yield Problem(path, shown, rule, cure)


def _known_keys(schema: dict[str, Any], location: tuple[int | str, ...]) -> list[str]:
    """Find the keys allowed at `location` by walking the JSON schema, which resolves nested and aliased fields."""
    definitions = schema.get("$defs", {})

    def resolve(node: dict[str, Any]) -> dict[str, Any]:
        while "$ref" in node:
            node = definitions[node["$ref"].rsplit("/", 1)[1]]
        options = [option for option in node.get("anyOf", []) + node.get("oneOf", []) if option.get("type") != "null"]
        if "properties" in node or not options:
            return node
        forms = [resolve(option) for option in options]
        keys = {key: value for form in forms for key, value in form.get("properties", {}).items()}
        return {**forms[0], "properties": keys} if keys else forms[0]

    node = resolve(schema)
    for part in location:
        if isinstance(part, int):
            node = resolve(node.get("items", {}))
        elif part in node.get("properties", {}):
            node = resolve(node["properties"][part])
        else:
            values = node.get("additionalProperties")
            node = resolve(values) if isinstance(values, dict) else node
    return sorted(node.get("properties", {}))


def _suggest(key: str, known: list[str]) -> str:
    if key in known:
        return "It does not go together with the other keys here; keep one form."
    return one_of(key, known, "Known keys:") if known else "Remove it."


def dump_yaml(data: Any, *, is_part: bool = False) -> str:
    """Render plain data as YAML in a stable form: keys in the given order, no aliases, floats as Python prints them.

    The first line says that the last line must be there, so that `load_document` can refuse a file that was cut.
    `is_part`: the text becomes a part of another document, and has no such lines.
    """
    text = yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)
    return text if is_part else f"{_FIRST_LINE}{text}{_LAST_LINE}"


def check_target(path: str | Path, *, is_folder: bool = False) -> None:
    """Return if a file could be written to a path now; commands that work for long ask before they begin.

    Args:
        path: as of `write_whole`.
        is_folder: the path is a folder of files to come, which is made if it is not there.

    Raises:
        OSError: it could not be written, or the path is empty.
    """
    folder = Path(os.path.realpath(path))
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        if not str(path):  # which is the present folder for `realpath`
            raise
        folder = folder.parent
        while is_folder and not folder.exists():
            folder = folder.parent
    else:
        if not is_folder:
            if stat.S_ISDIR(mode):
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
            if not stat.S_ISREG(mode):
                return
            folder = folder.parent
    with tempfile.TemporaryFile(dir=folder):
        pass


def unwritable(option: str, path: str | Path, error: OSError) -> InvalidInputError:
    """Return what to raise where a path that an option names cannot be written."""
    return refused(option, str(path), f"cannot be written ({error.strerror})", "Give a writable path.")


def write_whole(path: str | Path, content: str | Callable[[Path], None], *, mode: int | None = None) -> None:
    """Write a file whole or not at all: the old file stays until all of the new one is on the disk.

    Args:
        path: the file. For a link, the file that it points to is replaced. A path that is no file (/dev/stdout) is
            written to directly.
        content: a text, or a function that writes to the path that it is given.
        mode: permissions; default: those of the replaced file, else what the umask leaves.

    Raises:
        OSError: the file cannot be written; nothing was changed.
    """
    with contextlib.suppress(FileNotFoundError):
        before = os.stat(path).st_mode
        if not stat.S_ISREG(before):
            if not isinstance(content, str):
                raise IsADirectoryError(None, "is no file", str(path))
            Path(path).write_text(content, encoding="utf-8")
            return
        mode = stat.S_IMODE(before) if mode is None else mode
    file = Path(os.path.realpath(path))
    # The suffix stays, because numpy would append its own otherwise.
    partial = file.with_name(f".part-{secrets.token_hex(4)}{file.suffix}")
    try:
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666 if mode is None else mode)
        try:
            if mode is not None:
                os.fchmod(descriptor, mode)
            if isinstance(content, str):
                with open(descriptor, "w", encoding="utf-8", closefd=False) as stream:
                    stream.write(content)
            else:
                content(partial)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(partial, file)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    sync_folder(file.parent)


def sync_folder(folder: Path) -> None:
    """Have the names of the files in a folder on the disk: after a loss of power, a new file may have none otherwise.
    Where a folder cannot be read or synced, nothing happens."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
