"""The tests of OpenAI's own Python package, from its source distribution: completions, chats, models.

They are written for a stand-in that takes anything; so one that gives every field of the interface a value at once is
answered with 400 where a field asks for what a language model here cannot do.
"""

from __future__ import annotations

import argparse
import sys
import tarfile
from collections.abc import Iterable
from pathlib import Path
from xml.etree import ElementTree

from environments import python_environment, run
from served import Server
from verdicts import Case, last_line, run_suite

VERSION = "3.57.0"
TESTS = ("test_completions.py", "chat/test_completions.py", "test_models.py")
MODELS = ("gpt-3.5-turbo-instruct", "gpt-6-astra", "model")  # which the tests name
NEEDS = ("pytest>=9", "pytest-asyncio>=1.4", "rich>=13.7", "inline-snapshot>=0.28", "trio")
LEFT_OUT = {
    "delete": "models are not the clients' to delete",
    "update": "chats are not stored",
    "retrieve": "chats are not stored",
    "list": "chats are not stored",
}


def prepare(_arguments: argparse.Namespace, folder: Path):
    """Return the package's version and a case for each of its tests."""
    programs = python_environment(folder, f"openai[aiohttp]=={VERSION}", *NEEDS)
    sources = folder / f"openai-{VERSION}"
    if not sources.exists():
        words = ("--no-deps", "--no-binary", "openai", "--no-build-isolation", "-d", folder, f"openai=={VERSION}")
        run([programs / "pip", "install", "--quiet", "hatchling", "hatch-fancy-pypi-readme"])
        run([programs / "pip", "download", "--quiet", *words])
        with tarfile.open(next(folder.glob("openai-*.tar.gz"))) as archive:
            archive.extractall(folder, filter="data")

    def cases(server: Server) -> Iterable[Case]:
        report = folder / "report.xml"
        report.unlink(missing_ok=True)
        files = [f"tests/api_resources/{name}" for name in TESTS]
        done = run(
            [
                programs / "python",
                "-m",
                "pytest",
                "-q",
                "-o",
                "addopts=",
                "--tb=native",
                "--junit-xml",
                report,
                "-p",
                "no:cacheprovider",
                *files,
            ],
            environment={"TEST_API_BASE_URL": f"{server.url}/v1"},
            folder=sources,
            timeout_s=900.0,
        )
        if not report.exists():
            yield Case("pytest", "failed", last_line(done.stdout))
            return
        for test in ElementTree.parse(report).iter("testcase"):
            place = (test.get("classname") or "").removeprefix("tests.api_resources.")
            name = f"{place}.{test.get('name')}"
            wrong = [each for each in test if each.tag in ("failure", "error")]
            words = (test.get("name") or "").partition("[")[0].split("_")
            reason = next((why for word, why in LEFT_OUT.items() if word in words), "")
            is_stored = place.startswith("chat") or "delete" in words
            if not wrong:
                yield Case(name, "skipped" if test.find("skipped") is not None else "passed")
            elif reason and is_stored:
                yield Case(name, "skipped", reason)
            else:
                yield Case(name, "failed", (wrong[0].get("message") or "").split("\n")[0][:300])

    return VERSION, cases


def main() -> int:
    """Run it."""
    return run_suite("openai_python", __doc__, prepare, writers=MODELS)


if __name__ == "__main__":
    sys.exit(main())
