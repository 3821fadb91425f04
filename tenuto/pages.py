"""HTML and SVG from templates. What is filled in is escaped, and a name that is not given is an error."""

from __future__ import annotations

import functools

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined


@functools.cache
def templates(*packages: str) -> Environment:
    """Return the templates in the folders `templates/` of packages; of two with one name the first package's."""
    loader = ChoiceLoader([PackageLoader(package) for package in packages])
    return Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
