"""h2spec: the rules of HTTP/2 and HPACK, one case each, at the port of gRPC.

It is a program in Go that no registry has. Its sources come from a checkout of github.com/summerwind/h2spec and are
built with Debian's Go and Debian's packages of what it imports; nothing else is downloaded.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path
from xml.etree import ElementTree

from environments import UnavailableError, debian_environment, run
from served import Server
from verdicts import Case, last_line, run_suite

SOURCES = "github.com/summerwind/h2spec"
GO = ("golang-go", "golang-github-fatih-color-dev", "golang-github-spf13-cobra-dev", "golang-golang-x-net-dev")


def _built(folder: Path, checkout: Path | None) -> Path:
    program = folder / "h2spec"
    if checkout is None and not program.exists():
        raise UnavailableError(f"no registry has h2spec. Give --checkout DIR, a checkout of {SOURCES}.")
    if checkout is not None:
        debian = debian_environment(folder / "debian", *GO)
        sources = folder / "go/src" / SOURCES
        shutil.rmtree(sources, ignore_errors=True)
        shutil.copytree(checkout, sources)
        root = next(debian.glob("usr/lib/go-*"))
        variables = {
            "GO111MODULE": "off",
            "GOROOT": str(root),
            "GOPATH": f"{folder}/go:{debian}/usr/share/gocode",
            "GOCACHE": str(folder / "cache"),
        }
        command = [root / "bin/go", "build", "-o", program, "./cmd/h2spec"]
        done = run(command, environment=variables, folder=sources, timeout_s=900.0)
        if done.returncode:
            raise UnavailableError(f"h2spec cannot be built: {last_line(done.stdout)}")
    return program


def prepare(arguments: argparse.Namespace, folder: Path):
    """Return its version and its cases."""
    folder.mkdir(parents=True, exist_ok=True)
    program = _built(folder, arguments.checkout)

    def cases(server: Server) -> Iterable[Case]:
        report = folder / "report.xml"
        report.unlink(missing_ok=True)
        words = ("-h", "127.0.0.1", "-p", str(server.grpc_port), "-o", "2", "-j", report)
        done = run([program, *words], timeout_s=600.0)
        if not report.exists():
            yield Case("h2spec", "failed", last_line(done.stdout))
            return
        for each in ElementTree.parse(report).iter("testcase"):
            name = f"{each.get('package')} {each.get('classname')}"
            failure, skipped = each.find("failure"), each.find("skipped")
            error = each.find("error")
            if failure is not None or error is not None:
                wrong = failure if failure is not None else error
                yield Case(name, "failed", " ".join((wrong.text or "").split()))
            else:
                yield Case(name, "skipped" if skipped is not None else "passed")

    version = re.search(r"Version: (\S+)", run([program, "--version"]).stdout)
    return version[1] if version else "", cases


def main() -> int:
    """Run it."""
    return run_suite("h2spec", __doc__, prepare, checkout=SOURCES)


if __name__ == "__main__":
    sys.exit(main())
