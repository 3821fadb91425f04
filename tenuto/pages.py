"""HTML and SVG from templates. Values are escaped, and a name without a value is an error."""

from __future__ import annotations

import functools

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined


@functools.cache
def templates(*packages: str) -> Environment:
    """Return the templates in the folders `templates/` of packages. When two have the same name, the first package's is
    taken."""
    loader = ChoiceLoader([PackageLoader(package) for package in packages])
    return Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
