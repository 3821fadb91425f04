"""`tenuto key`: make an API key for a client."""

from __future__ import annotations

import click

from tenuto.cli.common import NumberRange, json_option, notice, printed_as_json, say
from tenuto.errors import refused


@click.command(name="key", short_help="Make an API key for a client.")
@click.argument("name")
@click.option(
    "--model", "models", multiple=True, metavar="PATTERN", help="Model that the client may use; repeatable.  [all]"
)
@click.option("--rate-rps", type=NumberRange(min=0, min_open=True), help="Most requests per second, on average.")
@click.option(
    "--burst", type=click.IntRange(1), metavar="N", help="Most requests at once.  [as many as --rate-rps gives in 1 s]"
)
@click.option(
    "--tokens-per-s",
    type=NumberRange(min=0, min_open=True),
    help="Most tokens per second that models read and write for the client, on average.",
)
@click.option("--offline", is_flag=True, help="All its requests are offline: no SLO, and only time that is left over.")
@json_option
def command(
    name: str,
    models: tuple[str, ...],
    rate_rps: float | None,
    burst: int | None,
    tokens_per_s: float | None,
    offline: bool,
) -> int:
    """Make a key, which is shown only once; its entry for the key file has only the hash.

    Example: tenuto key mobile-app --model 'resnet*' --rate-rps 200 >> keys.yaml
    """
    from pydantic import ValidationError

    from tenuto.deployments.security.keys import KeyEntry, new_key

    if not all(models):
        raise refused("--model", "", "names no model", "Write for example 'resnet*', or leave it away for all.")
    key, digest = new_key()
    try:
        entry = KeyEntry(
            name=name,
            sha256=digest,
            rate_rps=rate_rps,
            burst=burst,
            tokens_per_s=tokens_per_s,
            models=models or ("*",),
            offline=offline,
        )
    except ValidationError as error:
        raise refused(
            "NAME", name, "is not a client's name", "Use letters, digits, `.`, `-` and `_`, at most 64."
        ) from error
    data = entry.model_dump(mode="json", exclude_defaults=True)
    if printed_as_json({"key": key, "entry": data}):
        return 0
    notice(f"the key of {name}, shown only now: {key}")
    fields = ", ".join(f"{field}: {value if field != 'models' else list(value)}" for field, value in data.items())
    say(f"  - {{{fields}}}")
    return 0
