"""Reads texts, YAML, JSON and CSV within bounds: bytes, depth, entries, aliases, numbers. Knows no schema.

Every file of Tenuto is read here, whoever wrote it. What a bound refuses is refused before anything is built of it, and
each error names file, line and cure. YAML is that of version 1.2: `yes` and `on` are texts, `010` is ten.
"""

from __future__ import annotations

import codecs
import csv
import io
import json
import math
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import yaml

from tenuto.errors import InvalidInputError, refused

MOST_BYTES = 16 << 20  # limit: bytes of one file
MOST_ENTRIES = 500_000  # limit: values and keys of one file, aliases as what they stand for; they take 1 s to read
MOST_DEPTH = 64  # limit: a plan in a RayService is 16 deep; pydantic and our own functions recurse
MOST_TABLE_BYTES = 1 << 30  # limit: bytes of a CSV, which is read line by line; two weeks of Azure's trace have 150 MiB
_MOST_LINE = 1 << 20  # limit: characters of one line of a CSV
# Limit: products of three such numbers, and their reciprocals, are still finite.
_SMALLEST, _LARGEST = 1e-100, 1e100
_MOST_BITS = 64  # limit: of whole numbers; seeds and counts of bytes fit
_MOST_DIGITS = 400  # limit: characters of a number; no float prints with more

_SMALLER = "Split it, or leave out what is not needed."
_KINDS = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}

# YAML 1.2.2, section 10.3.2: the core schema.
_WORDS: dict[str, Any] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL"), None),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
    **dict.fromkeys((f"{sign}.{word}" for sign in ("", "+") for word in ("inf", "Inf", "INF")), math.inf),
    **dict.fromkeys(("-.inf", "-.Inf", "-.INF"), -math.inf),
    **dict.fromkeys((".nan", ".NaN", ".NAN"), math.nan),
}
_INTEGER = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")
_TAG = "tag:yaml.org,2002:"

# A string of JSON with the colon after it, if it is a key; one that does not end goes to the end of the text.
_JSON_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*+(?:"(\s*+:)?|\Z)|[\[\]{},]', re.DOTALL)

_JSON_WORDS = 3  # derived: strings, commas and brackets of an entry: `"a":"b",`
# Limit: libyaml looks through all that it has for each new one.
_MOST_TAG_LINES = 100

_MERGE = object()  # the key `<<`

# libyaml's classes are ten times as fast; every wheel of PyYAML has them.
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@contextmanager
def _opened(path: str | Path) -> Iterator[BinaryIO]:
    try:
        # Without O_NONBLOCK, a pipe would wait for a writer for ever.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as stream:
            mode = os.fstat(stream.fileno()).st_mode
            if not stat.S_ISREG(mode):
                kind = _KINDS.get(stat.S_IFMT(mode), "a device")
                raise refused(str(path), None, f"is {kind}, not a file", "Write the text to a file, and give its path.")
            yield stream
    except FileNotFoundError:
        raise InvalidInputError(f"{path}: no such file. Check the path.") from None
    except OSError as error:
        raise InvalidInputError(f"{path}: cannot be read ({error}). Check that it is a readable text file.") from error


def read_file(path: str | Path, most_bytes: int = MOST_BYTES) -> bytes:
    """Return the content of a file.

    Raises:
        InvalidInputError: it is absent, unreadable, no regular file, or has more than `most_bytes`.
    """
    with _opened(path) as stream:
        content = stream.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise refused(str(path), None, f"has more than {most_bytes:,} bytes", _SMALLER)
    return content


def decode_text(content: bytes, origin: str) -> str:
    """Return a text in UTF-8, with or without a byte order mark, or in UTF-16 with one, as some editors save it.

    Raises:
        InvalidInputError: it is no such text; `origin` is what the error calls it.
    """
    is_wide = content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    try:
        return content.decode("utf-16" if is_wide else "utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        cure = "Save it as a text in UTF-8."
        raise refused(f"{origin}: line {line}", None, f"cannot be read ({error.reason})", cure) from None


def read_text(path: str | Path, most_bytes: int = MOST_BYTES) -> str:
    """Return the text of a file; see `read_file` and `decode_text` for the errors."""
    return decode_text(read_file(path, most_bytes), str(path))


def parse_number(text: str) -> int | float:
    """Return the number that a text in decimal, `0x` or `0o` is, a whole one as an integer.

    Raises:
        ValueError: it is none; the message says so, or which bound it breaks.
    """
    text = text.strip() if len(text) <= _MOST_DIGITS else ""
    if _INTEGER.fullmatch(text):
        number = int(text, 0 if text[:2] in ("0o", "0x") else 10)
        if number.bit_length() > _MOST_BITS:
            raise ValueError(f"is a whole number of more than {_MOST_BITS} bits")
        return number
    if not _FLOAT.fullmatch(text):
        raise ValueError("is not a number" if text else f"is a number of more than {_MOST_DIGITS} characters")
    value = float(text)
    if not _SMALLEST <= abs(value) <= _LARGEST and (value or float(text.lower().partition("e")[0])):
        raise ValueError(f"is not 0, and not between {_SMALLEST:g} and {_LARGEST:g}")
    return value


# --- YAML -------------------------------------------------------------------------------------------------------------


class _Open:
    """A mapping or a list whose end has not come yet. `key`: the mapping's key whose value comes next."""

    __slots__ = ("anchor", "begin", "data", "has_key", "is_mapping", "key", "merged")

    def __init__(self, data: Any, anchor: str | None, begin: int) -> None:
        self.data, self.anchor, self.begin = data, anchor, begin
        self.is_mapping, self.has_key = type(data) is dict, False
        self.key: Any = None
        self.merged: list[Any] = []


def parse_yaml(text: str, origin: str = "") -> Any:
    """Return the plain data of a YAML text.

    Args:
        text: one document, or none.
        origin: what errors call it.

    Raises:
        InvalidInputError: it is not YAML 1.2, has a key twice, or breaks a bound of this module.
    """
    if text.count("%TAG") > _MOST_TAG_LINES:
        raise refused(origin or "YAML", None, f"has more than {_MOST_TAG_LINES} lines of %TAG", "Remove them.")
    try:
        return _built(_Loader(text), origin)
    except (yaml.YAMLError, UnicodeEncodeError) as error:  # the latter: half a character, as of an argument
        mark = getattr(error, "problem_mark", None)
        where = f"{origin}: " if origin else ""
        line = f"line {mark.line + 1}, column {mark.column + 1}: " if mark is not None else ""
        detail = getattr(error, "problem", None) or " ".join(str(error).split())
        raise InvalidInputError(f"{where}{line}not valid YAML or JSON ({detail}). Repair the syntax there.") from None


def _built(parser: Any, origin: str) -> Any:
    """Build the data of a parser's events in one loop. libyaml's own composer calls itself for each level, so that a
    deep text ends the process."""
    event: Any = None

    def fault(rule: str, cure: str, value: Any = None) -> InvalidInputError:
        line = event.start_mark.line + 1
        return refused(f"{origin}: line {line}" if origin else f"line {line}", value, rule, cure)

    built: Any = None
    documents = entries = 0
    levels: list[_Open] = []
    level: _Open | None = None
    # Of each anchor whose value has ended: that value, and how many entries it has.
    anchors: dict[str, tuple[Any, int]] = {}
    while True:
        event = parser.get_event()
        kind = type(event)
        if kind is yaml.ScalarEvent:
            entries += 1
            value = event.value
            if event.tag is not None or event.implicit[0]:
                try:
                    value = _scalar(value, event.tag)
                except ValueError as error:
                    raise fault(str(error), "Correct it, or quote it if it is a text.", value) from None
                if value == "<<" and level is not None and level.is_mapping and not level.has_key:
                    value = _MERGE
            if event.anchor is not None:
                anchors[event.anchor] = value, 1
        elif kind is yaml.MappingStartEvent or kind is yaml.SequenceStartEvent:
            entries += 1
            data: Any = {} if kind is yaml.MappingStartEvent else []
            if event.tag not in (None, "!", f"{_TAG}map", f"{_TAG}seq"):
                raise fault(f"tag {event.tag} is not known", "Remove the tag.")
            if len(levels) >= MOST_DEPTH:
                raise fault(f"is more than {MOST_DEPTH} levels deep", "Write it flatter.")
            if level is not None and level.is_mapping and not level.has_key:
                raise fault("a key is a list or a mapping", "Use a text as the key.")
            level = _Open(data, event.anchor, entries)
            levels.append(level)
            continue
        elif kind is yaml.MappingEndEvent or kind is yaml.SequenceEndEvent:
            ended = levels.pop()
            for source in ended.merged:  # the first one wins
                ended.data = {**source, **ended.data}
            value = ended.data
            if ended.anchor is not None:
                anchors[ended.anchor] = value, entries - ended.begin + 1
            level = levels[-1] if levels else None
        elif kind is yaml.AliasEvent:
            if event.anchor not in anchors:
                raise fault(f"alias *{event.anchor} stands for nothing before it", "Write out what it means.")
            value, size = anchors[event.anchor]
            entries += size
        elif kind is yaml.DocumentStartEvent:
            documents += 1
            if documents > 1:
                raise fault("a second document begins", "Write one document into each file.")
            continue
        elif kind is yaml.StreamEndEvent:
            return built
        else:
            continue
        if entries > MOST_ENTRIES:
            raise fault(f"has more than {MOST_ENTRIES:,} entries, aliases counted as what they stand for", _SMALLER)
        if level is None:
            built = value
        elif not level.is_mapping:
            level.data.append(value)
        elif not level.has_key:
            if type(value) in (dict, list):
                raise fault("a key is a list or a mapping", "Use a text as the key.")
            if value in level.data:
                raise fault("this key is given twice in one mapping", "Keep one of them.", value)
            level.has_key, level.key = True, value
        else:
            level.has_key = False
            if level.key is _MERGE and (sources := value if type(value) is list else [value]):
                if any(type(source) is not dict for source in sources):
                    raise fault("`<<` merges mappings only", "Give an alias of a mapping.")
                level.merged += sources
            else:
                level.data[level.key] = value


def _scalar(text: str, tag: str | None) -> Any:
    """Return the value of a plain scalar, or of one with a tag, in the core schema; raises `ValueError`."""
    if tag in ("!", f"{_TAG}str"):
        return text
    if tag is not None:
        if tag not in (f"{_TAG}int", f"{_TAG}float", f"{_TAG}bool", f"{_TAG}null"):
            raise ValueError(f"tag {tag} is not known")
        value = _scalar(text, None)
        kinds = {"int": (int,), "float": (int, float), "bool": (bool,), "null": (type(None),)}[tag.removeprefix(_TAG)]
        if type(value) not in kinds:
            raise ValueError(f"is not what its tag {tag} says")
        return value
    if text in _WORDS:
        return _WORDS[text]
    if text[0] in "-+.0123456789" and (_FLOAT.fullmatch(text) or _INTEGER.fullmatch(text)):
        return parse_number(text)
    return text


def is_plain_text(text: str) -> bool:
    """Whether YAML 1.2 reads a text without quotes as a text, and not as a number or a word of its own."""
    return bool(text) and text not in _WORDS and not _FLOAT.fullmatch(text) and not _INTEGER.fullmatch(text)


# --- JSON -------------------------------------------------------------------------------------------------------------


def parse_json(text: str, origin: str, most_entries: int = MOST_ENTRIES) -> Any:
    """Return the plain data of a JSON text.

    Raises:
        InvalidInputError: it is not JSON, has a key twice, or breaks a bound of this module.
    """
    _check_json(text, origin, most_entries)

    def number(given: str) -> Any:
        try:
            return parse_number(given)
        except ValueError as error:
            raise refused(origin, given, str(error), "Correct it.") from None

    def constant(name: str) -> Any:
        raise refused(origin, None, f"{name} is no number of JSON", "Give a finite number, or null.")

    try:
        value = json.loads(text, parse_int=number, parse_float=number, parse_constant=constant)
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        where = f"{origin}: line {error.lineno}, column {error.colno}"
        raise InvalidInputError(f"{where}: not valid JSON ({error.msg}). Repair the syntax there.") from None
    except UnicodeEncodeError:
        cure = "Save the text again, with whole characters."
        raise refused(origin, None, "has half a character (one surrogate of two)", cure) from None
    return value


def _check_json(text: str, origin: str, most_entries: int) -> None:
    """Raise `InvalidInputError` for what is too deep, too much, or has a key twice."""
    keys: list[set[str]] = []
    for words, token in enumerate(_JSON_TOKEN.finditer(text)):
        word = token[0]
        rule = cure = ""
        if word[0] == '"':
            if token[1] is not None and keys:
                key = word[: -len(token[1])]
                if key in keys[-1]:
                    rule, cure = f"key {key[:60]} is given twice in one mapping", "Keep one of them."
                keys[-1].add(key)
        elif word in "[{":
            keys.append(set())
            if len(keys) > MOST_DEPTH:
                rule, cure = f"is more than {MOST_DEPTH} levels deep", "Write it flatter."
        elif word != "," and keys:
            keys.pop()
        if words > _JSON_WORDS * most_entries:
            rule, cure = f"has more than {most_entries:,} entries", _SMALLER
        if rule:
            raise refused(f"{origin}: line {text.count(chr(10), 0, token.start()) + 1}", None, rule, cure)


# --- CSV --------------------------------------------------------------------------------------------------------------


@contextmanager
def csv_rows(
    path: str | Path, needed: tuple[str, ...], cure: str
) -> Iterator[tuple[dict[str, int], Iterator[tuple[int, list[str]]]]]:
    """Yield the columns of a CSV by name, and its rows with their line numbers. Empty lines are left out, and rows that
    are too short are filled with empty cells.

    Args:
        path: a text in UTF-8, with or without a byte order mark.
        needed: columns that must be there.
        cure: what errors advise.

    Raises:
        InvalidInputError: the file cannot be read, is no CSV, lacks a column or has one twice, or a line is too long.
    """

    def fault(line: int, value: Any, rule: str, better: str = cure) -> InvalidInputError:
        return refused(f"{path}: line {line}", value, rule, better)

    def lines(stream: Any) -> Iterator[str]:
        number = size = 0
        while line := stream.readline(_MOST_LINE):
            number, size = number + 1, size + len(line)
            if len(line) == _MOST_LINE:
                raise fault(number, None, f"has more than {_MOST_LINE:,} characters")
            if size > MOST_TABLE_BYTES:
                raise fault(number, None, f"the file has more than {MOST_TABLE_BYTES:,} bytes", _SMALLER)
            yield line

    def rows() -> Iterator[tuple[int, list[str]]]:
        for row in reader:
            if row:
                yield reader.line_num, row if len(row) >= width else row + [""] * (width - len(row))

    try:
        with _opened(path) as content, io.TextIOWrapper(content, encoding="utf-8-sig", newline="") as stream:
            reader = csv.reader(lines(stream))
            names = next(reader, [])
            width, header = len(names), {name: index for index, name in enumerate(names)}
            missing = [name for name in needed if name not in header]
            shown = ",".join(names)[:60]
            if missing:
                raise fault(1, shown, f"has no column {', '.join(missing)}", cure)
            if len(header) < width:
                raise fault(1, shown, "has a column twice", "Give every column a name of its own.")
            yield header, rows()
    except (UnicodeDecodeError, csv.Error) as error:
        raise refused(str(path), None, f"cannot be read ({error})", cure) from error
