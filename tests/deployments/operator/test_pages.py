"""No page of Tenuto loads anything from another site."""

import ast
import asyncio
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from tenuto.deployments.entry.service.inference import InferenceService
from tenuto.deployments.entry.service.management_routes import make_app
from tenuto.deployments.operator.app import make_operator_app
from tenuto.deployments.operator.web_pages import docs_page, live_page
from tenuto.pages import templates

ROOT = Path(__file__).parents[3]
LOADS = ("src", "srcset", "data", "action", "poster", "background", "xlink:href")


class Loaded(HTMLParser):
    """Collects the addresses that a browser loads by itself; links to follow are none."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = LOADS if tag == "a" else (*LOADS, "href")
        self.found += [value or "" for name, value in attrs if name in names]

    def parse_marked_section(self, i: int, report: int = 1) -> int:
        """Pass over `<![`, which is no HTML and stands in sources, as in `(?<![ab])`."""
        return i + len("<![")


def loaded_by(page: str) -> list[str]:
    parser = Loaded()
    parser.feed(page)
    parser.close()
    named = re.findall(r"(?:url\(|@import|fetch\(|import\()\s*[\"']?([^\"')\s]+)", page)
    return [address for address in (*parser.found, *named) if re.match(r"([a-z]+:)?//", address)]


def pages() -> dict[str, str]:
    async def apps() -> list[Any]:
        service = InferenceService(lambda _exchange, _caller: None)
        watched: Any = Mock()
        made = [make_app(service), make_operator_app(watched)]
        service.close()
        return made

    clients, operators = asyncio.run(apps())
    return {
        "live": live_page().html.decode(),
        "docs of clients": docs_page(clients.openapi()),
        "docs of operators": docs_page(operators.openapi()),
        "report": templates("tenuto.loadgen.report").get_template("page.html").render(),
    }


def test_a_page_that_loads_something_would_be_found() -> None:
    for bad in (
        '<script src="https://cdn.example/x.js"></script>',
        '<link rel=stylesheet href="//cdn.example/x.css">',
        "<style>@import 'https://cdn.example/x.css'</style>",
        "<style>p { background: url(https://cdn.example/x.png) }</style>",
        "<script>fetch('https://cdn.example')</script>",
    ):
        assert loaded_by(bad), bad


@pytest.mark.parametrize("name", list(pages()))
def test_no_page_loads_anything_from_elsewhere(name: str) -> None:
    assert loaded_by(pages()[name]) == []


def test_the_docs_name_every_route_and_escape_what_they_show() -> None:
    shown = pages()["docs of clients"]
    for route in ("POST /v2/models/{model}/infer", "POST /predict/{model}", "GET /v2/models/{model}/ready"):
        assert route in shown
    page = docs_page({"info": {"title": "<i>", "version": "1"}, "paths": {"/<b>": {"get": {"summary": "<script>"}}}})
    assert "<i>" not in page
    assert "<b>" not in page
    assert "<script>" not in page


def test_every_application_goes_without_fastapis_own_pages() -> None:
    """They load scripts and styles from another site."""
    made = [
        (path, {keyword.arg for keyword in call.keywords if ast.unparse(keyword.value) == "None"})
        for path in (ROOT / "deployments").rglob("*.py")
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "FastAPI"
    ]
    assert len(made) == 2
    assert all({"docs_url", "redoc_url"} <= off for _, off in made), made


def test_no_source_of_a_page_names_an_address_to_load() -> None:
    """Pages that are not made above, such as reports, are made of texts in the product's files."""
    found = [
        (path.relative_to(ROOT).as_posix(), line)
        for folder in ("profiles", "mps", "placement", "batching", "deployments", "loadgen", "tenuto")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".html", ".js", ".css") and not any(each.is_symlink() for each in path.parents)
        for line in path.read_text(encoding="utf-8").splitlines()
        if loaded_by(line) or re.search(r"(src|srcset)\s*=\s*\\?[\"']?(https?:)?//", line)
    ]
    assert found == []
