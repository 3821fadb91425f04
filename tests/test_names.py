"""Names are words of the field: modules and public classes take theirs from a list, and some words are in no name."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("profiles", "mps", "placement", "batching", "deployments", "loadgen", "tenuto")
CONCEPTS = ROOT / "docs" / "reference" / "concepts.md"
ORDINARY = ROOT / "tests" / "data" / "words.txt"

# Words that say nothing of what a thing is, and how many names of modules, classes and functions still have them. A
# number may only fall: whoever renames one lowers it.
EMPTY_WORDS = {
    "asked": 16,
    "charge": 4,
    "found": 6,
    "here": 3,
    "kept": 5,
    "laying": 0,
    "near": 2,
    "there": 2,
    "told": 8,
    "wanted": 2,
    "whereabouts": 0,
    "worth": 5,
}
# The same for values: local variables and arguments with such a name.
EMPTY_VALUES = {"asked": 14, "found": 26, "here": 3, "kept": 4, "said": 8, "there": 1, "told": 6, "wanted": 6}
# Verbs that need an object, and how many functions are called so and no more.
LONE_VERBS = {"ask": 15, "do": 3, "go_on": 3, "leave": 15, "look": 8, "put": 6, "say": 4, "take": 16, "tell": 8}


@cache
def sources() -> dict[str, ast.Module]:
    """The tree of every module of the machine, by its path; each is read where it is, and not through a link."""
    files = [
        file
        for folder in FOLDERS
        for file in sorted((ROOT / folder).rglob("*.py"))
        if not any(parent.is_symlink() for parent in file.parents if parent != ROOT)
    ]
    return {str(file.relative_to(ROOT)): ast.parse(file.read_text(encoding="utf-8")) for file in files}


def words_of(name: str) -> list[str]:
    """The words of a name in snake case or in camel case, without numbers."""
    return [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)]


def named() -> Iterator[tuple[str, str, str]]:
    """Every module, class and function: its kind, its name and where it is."""
    for place, tree in sources().items():
        if not place.endswith("__init__.py"):
            yield "module", Path(place).stem, place
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                yield "class", node.name, place
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield "function", node.name, place


def known_words() -> set[str]:
    """The terms of the page of words, ordinary words of names, and those whose number may only fall."""
    rows = re.findall(r"^\| ([^|]+) \|", CONCEPTS.read_text(encoding="utf-8"), re.M)
    terms = {word for row in rows for word in words_of(row)}
    return terms | set(ORDINARY.read_text(encoding="utf-8").split()) | set(EMPTY_WORDS)


def test_names_of_modules_and_public_classes_are_words_of_the_list() -> None:
    known = known_words()
    new = {
        word: f"{name} ({place})"
        for kind, name, place in named()
        if kind != "function" and not name.startswith("_")
        for word in words_of(name)
        if word not in known and word.removesuffix("s") not in known
    }
    cure = (
        "Take a word of docs/reference/concepts.md that means the same. A new term of the field gets a line there; an "
        "ordinary English word goes into tests/data/words.txt, in its order."
    )
    assert not new, f"{cure} New words: {new}"


def test_ordinary_words_are_in_order_and_once() -> None:
    listed = ORDINARY.read_text(encoding="utf-8").split()
    assert listed == sorted(set(listed))


def check_counts(names: list[tuple[str, str]], counted: dict[str, int], cure: str) -> None:
    """Check that each word counted occurs as often as written, of names as (word, where it is)."""
    counts = Counter(word for word, _ in names if word in counted)
    above = {word: [place for each, place in names if each == word] for word in counts if counts[word] > counted[word]}
    assert not above, f"{cure}: {above}"
    assert {word: counts[word] for word in counted} == counted, "fewer are left: lower the numbers"


def test_no_further_name_has_a_word_that_says_nothing() -> None:
    names = [(word, f"{name} ({place})") for _, name, place in named() for word in words_of(name)]
    check_counts(names, EMPTY_WORDS, "Name what the thing holds or does, in words of the field")


def test_no_further_value_has_a_name_that_says_nothing() -> None:
    values: list[tuple[str, str]] = []
    for place, tree in sources().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.arg):
                values.append((node.arg, f"{place}:{node.lineno}"))
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                values.append((node.id, f"{place}:{node.lineno}"))
    check_counts(values, EMPTY_VALUES, "Name a value after what it holds")


def test_no_further_function_is_a_verb_without_its_object() -> None:
    names = [(name.strip("_"), f"{name} ({place})") for kind, name, place in named() if kind == "function"]
    check_counts(names, LONE_VERBS, "Say what it is done to (`claim_lease`, not `take`)")
