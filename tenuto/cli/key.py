"""`tenuto key`: a new API key for a client."""

from __future__ import annotations

import click

from tenuto.cli.common import emit_json, json_option, progress_console, stdout_console
from tenuto.errors import refused


@click.command(name="key", short_help="Make an API key for a client.")
@click.argument("name")
@click.option("--model", "models", multiple=True, metavar="PATTERN", help="Model it may ask for; repeatable.  [all]")
@click.option("--rate-rps", type=click.FloatRange(min=0, min_open=True), help="Most requests per second, on average.")
@json_option
def command(name: str, models: tuple[str, ...], rate_rps: float | None, as_json: bool) -> int:
    """Make a key: the key itself is shown once, its entry for the key file keeps only the hash.

    Example: tenuto key mobile-app --model 'resnet*' --rate-rps 200 >> keys.yaml
    """
    from pydantic import ValidationError

    from tenuto.deployments.security.keys import KeyEntry, new_key

    if not all(models):
        raise refused("--model", "", "names no model", "Write for example 'resnet*', or leave it away for all.")
    key, digest = new_key()
    try:
        entry = KeyEntry(name=name, sha256=digest, rate_rps=rate_rps, models=models or ("*",))
    except ValidationError as error:
        raise refused(
            "NAME", name, "is not a client's name", "Use letters, digits, `.`, `-` and `_`, at most 64."
        ) from error
    data = entry.model_dump(mode="json", exclude_defaults=True)
    if as_json:
        emit_json({"key": key, "entry": data})
        return 0
    progress_console().print(f"the key of {name}, shown only now: {key}", soft_wrap=True, markup=False)
    fields = ", ".join(f"{field}: {value if field != 'models' else list(value)}" for field, value in data.items())
    stdout_console().print(f"  - {{{fields}}}", soft_wrap=True, markup=False)
    return 0
