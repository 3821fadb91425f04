"""The command line: one module per verb, imported only when that verb is used. Other packages add theirs.

Data goes to stdout, progress to stderr. Exit codes: 0 ok, 1 verdict failed, 2 wrong input, 3 environment.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import io
import os
import sys
from collections.abc import Callable
from typing import Any, cast

import click

from tenuto import plugins, version
from tenuto.errors import TenutoError, first_line, printable

# Each is a module below tenuto.cli. The order is that of --help.
GROUPS = {
    "Start": ("quickstart", "doctor", "add"),
    "Measure": ("profile", "profiles", "merge", "cluster"),
    "Plan": ("import", "plan", "explain", "policies", "simulate", "goodput", "fleet"),
    "Run": (
        "serve",
        "deploy",
        "diff",
        "history",
        "rollback",
        "drain",
        "undrain",
        "delete",
        "control",
        "model",
        "status",
        "logs",
        "key",
    ),
    "Judge": ("bench", "report"),
}
VERBS = tuple(name for names in GROUPS.values() for name in names)
_MODULES = {"import": "import_repository"}  # of verbs that are words of Python
# What brings modules of others that a command may miss.
BRINGS = {
    "tenuto[serve]": "PIL aiohttp cryptography fastapi httptools orjson pynvml ray safetensors starlette sympy "
    "tokenizers torch torchvision transformers uvicorn uvloop",
    "tenuto[structured]": "llguidance",
    "tenuto[tracing]": "opentelemetry requests",
    "tenuto[grpc]": "google grpc grpc_reflection h2 hyperframe",
    "tenuto[triton]": "tritonclient",
    "tenuto[onnx]": "onnx onnxruntime onnxscript",
    "tenuto[vllm]": "vllm",
    "tenuto-lab": "cma networkx sklearn xgboost",
}

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # format: Linux's


def verb_names() -> list[str]:
    """Return all verbs in the order of --help: Tenuto's own, then those of other packages."""
    return [*VERBS, *(name for name in plugins.registered(plugins.VERBS) if name not in VERBS)]


def load_verb(name: str) -> click.Command | None:
    """Return the command of a verb; None if there is no such verb."""
    if name in VERBS:
        own: click.Command = importlib.import_module(f"tenuto.cli.{_MODULES.get(name, name)}").command
        return own
    point = plugins.registered(plugins.VERBS).get(name)
    return None if point is None else cast(click.Command, point.load())


class _Verbs(click.Group):
    """Loads a verb's module on first use, so that `tenuto --help` and planning start without Ray or torch."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return verb_names()

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        return load_verb(cmd_name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        others = tuple(name for name in verb_names() if name not in VERBS)
        for heading, names in (*GROUPS.items(), ("Of other packages", others)):
            verbs = {name: load_verb(name) for name in names}
            if verbs:
                with formatter.section(heading):
                    formatter.write_dl([(name, verb.get_short_help_str(100)) for name, verb in verbs.items() if verb])

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError:
            cure = plugins.cure_of_unknown(plugins.VERBS, args[0], verb_names())
            raise click.UsageError(f"unknown command '{args[0]}'. {cure}", ctx) from None


@click.group(cls=_Verbs, context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.version_option(version(), prog_name="tenuto")
def root() -> None:
    """Serve many models on few GPUs, each within its latency SLO.

    Example: tenuto quickstart
    """


def main(args: list[str] | None = None) -> None:
    """Run the command line and exit with its code; no traceback reaches a user unless TENUTO_DEBUG is set."""
    sys.exit(exit_code(lambda: root.main(args=args, prog_name="tenuto", standalone_mode=False)))


def exit_code(run: Callable[[], Any]) -> int:
    """Run a function and return the exit code. When it fails, print why on stderr. A closed stdout or stderr is no
    failure."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the parent process
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115  # as long as the process
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as stderr: a locale without a sign of ours fails no command
    try:
        code = run()
        sys.stdout.flush()
    except TenutoError as error:
        return _failed(f"error: {error}", error.exit_code, error)
    except click.ClickException as error:
        error.show(file=sys.stderr)
        return 2
    except (KeyboardInterrupt, click.Abort):
        return _failed("interrupted", 130)
    except BrokenPipeError:  # the reader has closed the pipe
        for stream in (sys.stdout, sys.stderr):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        return 0
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "tenuto":
            raise
        return _failed(f"error: this command needs the package '{error.name}'. Run: {installs(error.name)}", 3, error)
    except Exception as error:
        if isinstance(error, OSError) and error.errno in _FULL:
            _drop_what_cannot_be_written()
            what = error.filename or "the output"
            return _failed(f"error: {what} cannot be written ({error.strerror}). Write it elsewhere.", 3, error)
        if isinstance(error, OSError) and isinstance(error.filename, str):  # the system refused a path
            path = printable(error.filename)
            return _failed(f"error: {path}: cannot be used ({error.strerror}). Give another path.", 2, error)
        if isinstance(error, UnicodeEncodeError) and error.object[error.start] > "\ud7ff":  # bytes of an argument
            return _failed(f"error: {printable(ascii(error.object))}: is no text in UTF-8. Correct it.", 2, error)
        ray = sys.modules.get("ray.exceptions")
        if ray is not None and isinstance(error, ray.RayError):
            why = f"Ray or a process of it ended or does not answer ({type(error).__name__}: {first_line(error)})"
            return _failed(f"error: {why}. Run `tenuto doctor`; Ray's session_latest/logs say more.", 3, error)
        return _failed(
            f"internal error: {type(error).__name__}: {error}. Set TENUTO_DEBUG=1 for the traceback.", 3, error
        )
    return code if isinstance(code, int) else 0


def _drop_what_cannot_be_written() -> None:
    """Drop what stdout still holds if it cannot be written. Python would try again at the end, and exit with 120."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def installs(module: str) -> str:
    """Return the command that installs a module of somebody else's: with the part of Tenuto that needs it, or alone."""
    name = module.partition(".")[0]
    extra = next((extra for extra, modules in BRINGS.items() if name in modules.split()), name)
    return f"pip install '{extra}'"


def _failed(message: str, code: int, error: BaseException | None = None) -> int:
    if error is not None and os.environ.get("TENUTO_DEBUG"):
        raise error
    with contextlib.suppress(OSError):
        print(printable(message, None), file=sys.stderr)
    return code
