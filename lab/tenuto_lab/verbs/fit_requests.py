"""`tenuto fit-requests`: what steps of a model that generates cost, from the log of an engine's requests."""

from __future__ import annotations

import shlex
from datetime import UTC, datetime
from pathlib import Path

import click

from tenuto.cli.common import NumberRange, command_line, json_option, notice, output_option, say
from tenuto.cli.profile_generation import report_profile
from tenuto.documents import check_target, write_whole
from tenuto.errors import refused
from tenuto.profiles import Measured, ModelProfile, Profile
from tenuto.profiles.gpu_types import memory_mib_of
from tenuto_lab.generation.request_fit import fit_requests
from tenuto_lab.generation.request_log import read_requests

_LIMIT = click.IntRange(min=1)


@click.command("fit-requests", short_help="Fit what steps of a model cost to a log of requests that an engine served.")
@click.argument("log", metavar="LOG")
@click.option("--gpu", required=True, metavar="TYPE", help="GPU type that served the log.")
@click.option("--name", required=True, metavar="NAME", help="Name of the model in the profile.")
@click.option("--max-sequences", type=_LIMIT, help="The engine's limit. Default: 256, or less if the log shows it.")
@click.option("--max-batch-tokens", type=_LIMIT, default=2048, help="The engine's limit.")
@click.option("--kv-tokens", type=_LIMIT, help="Tokens its KV cache holds. Default: as the log shows.")
@click.option("--memory-mib", type=NumberRange(min=1), help="Memory of the GPU, for types not known by name.")
@output_option("Profile file; default profile-TYPE.yaml, such as profile-a100.yaml.")
@json_option
def command(
    log: str,
    gpu: str,
    name: str,
    max_sequences: int | None,
    max_batch_tokens: int,
    kv_tokens: int | None,
    memory_mib: float | None,
    output: str | None,
) -> None:
    """Fit what steps cost to LOG, write the profile, and print how well the log comes out of it.

    LOG is a CSV with queued_s, input_tokens, output_tokens, first_token_s and last_token_s.

    Example: tenuto fit-requests log.csv --gpu a100 --name llama -o a100.yaml
    """
    if max_sequences is not None and max_batch_tokens < max_sequences:
        rule = f"is above --max-batch-tokens ({max_batch_tokens}), so that a step cannot decode all sequences"
        raise refused("--max-sequences", max_sequences, rule, "Lower it, or raise the other.")
    path = Path(output or f"profile-{gpu}.yaml")
    check_target(path)
    requests = read_requests(log)
    notice(f"fitting {len(requests)} requests; this takes up to a minute or two")
    fitted = fit_requests(requests, max_sequences=max_sequences, max_batch_tokens=max_batch_tokens, kv_tokens=kv_tokens)
    today = datetime.now(UTC).date().isoformat()
    profile = Profile(
        name=f"{name}-{gpu}",
        gpu_type=gpu,
        source=f"fitted to {len(requests)} requests of {Path(log).name}",
        measured=Measured(hardware=gpu, date=today, command=shlex.join(command_line())),
        memory_mib=memory_mib or memory_mib_of(gpu),
        models={name: ModelProfile(generation=fitted.generation, doubts=fitted.warnings)},
    )
    write_whole(path, profile.dump())
    if report_profile(profile, path):
        return
    cost, kv = fitted.generation.cost(), fitted.generation.kv_tokens
    say(
        f"{name} on {gpu}: a step takes {cost.ms(0, 1):.2f} ms with one sequence, {cost.ms(0, 32):.2f} with "
        f"32, {cost.ms(512):.2f} with 512 prompt tokens; memory for "
        + (f"{kv:,} tokens" if kv is not None else "tokens was never short")
    )
    say(f"at most {fitted.max_sequences} sequences and {max_batch_tokens} tokens a step")
    errors = ", ".join(f"{key} {value:+.2f} %" for key, value in fitted.errors_pct.items())
    say(f"the log's means come out with these errors: {errors}")
