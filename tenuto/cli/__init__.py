"""The command line: one module per verb, imported only when that verb is used.

Data goes to stdout, progress to stderr. Exit codes: 0 ok, 1 verdict failed, 2 wrong input, 3 environment.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

import click

from tenuto import version
from tenuto.errors import TenutoError

# Each is a module below tenuto.cli. The order is that of --help.
VERBS = (
    "quickstart", "profile", "profiles", "estimate", "merge", "cluster", "plan", "policies", "simulate", "goodput",
    "capacity", "partition", "key", "serve", "deploy", "diff", "history", "rollback", "delete", "control", "model",
    "bench", "report", "compare", "experiment", "status", "top", "doctor",
)  # fmt: skip


class _Verbs(click.Group):
    """Loads a verb's module on first use, so that `tenuto --help` and planning start without Ray or torch."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in VERBS:
            return None
        command: click.Command = importlib.import_module(f"tenuto.cli.{cmd_name}").command
        return command

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError:
            raise click.UsageError(f"unknown command '{args[0]}'. Commands: {', '.join(VERBS)}.", ctx) from None


@click.group(cls=_Verbs, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(version(), prog_name="tenuto")
def _tenuto() -> None:
    """Serve many models on few GPUs, each within its latency SLO.

    Example: tenuto quickstart
    """


def main(args: list[str] | None = None) -> None:
    """Run the command line and exit with its code; no traceback reaches a user unless TENUTO_DEBUG is set."""
    try:
        code = _tenuto.main(args=args, prog_name="tenuto", standalone_mode=False)
        sys.stdout.flush()
    except TenutoError as error:
        _fail(f"error: {error}", error.exit_code, error)
    except click.ClickException as error:
        error.show(file=sys.stderr)
        sys.exit(2)
    except (KeyboardInterrupt, click.Abort):
        _fail("interrupted", 130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("tenuto"):
            raise
        _fail(f"error: this command needs the package '{error.name}'. Run: pip install 'tenuto[serve]'", 3, error)
    except Exception as error:
        _fail(f"internal error: {type(error).__name__}: {error}. Set TENUTO_DEBUG=1 for the traceback.", 3, error)
    else:
        sys.exit(code if isinstance(code, int) else 0)


def _fail(message: str, code: int, error: BaseException | None = None) -> None:
    if error is not None and os.environ.get("TENUTO_DEBUG"):
        raise error
    print(message, file=sys.stderr)
    sys.exit(code)
