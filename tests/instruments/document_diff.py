"""What differs between two documents, such as plans, as lines that a person reads: pytest prints each on one line of
20 kB."""

import difflib

import yaml
from pydantic import BaseModel

__all__ = ["explain_difference"]

_MOST_LINES = 100  # limit: of a difference that is shown


def explain_difference(left: object, right: object) -> list[str] | None:
    """Return how the YAML of two documents differs, for pytest; None when these are not two documents of one kind."""
    if not isinstance(left, BaseModel) or not isinstance(right, type(left)):
        return None
    texts = [yaml.safe_dump(each.model_dump(mode="json"), sort_keys=False).splitlines() for each in (left, right)]
    lines = list(difflib.unified_diff(*texts, "left", "right", lineterm=""))
    more = [f"… and {len(lines) - _MOST_LINES} more lines"] if len(lines) > _MOST_LINES else []
    return [f"{type(left).__name__} == {type(left).__name__}", *lines[:_MOST_LINES], *more]
