"""`tenuto profile` of models that generate: what steps cost, timed here or from a log of served requests."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from tenuto.cli.common import command_line, gathered, notice, printed_as_json, say
from tenuto.documents import parse_pairs, write_whole
from tenuto.errors import EnvironmentFaultError, Problem, TenutoError, raise_if_any
from tenuto.mps.gpu_shares import shares_of
from tenuto.profiles import Generation, Measured, ModelProfile, Profile
from tenuto.profiles.gpu_types import memory_mib_of
from tenuto.profiles.networks.model_options import ModelOptions


@dataclass(frozen=True)
class FromRequests:
    """The arguments for a profile from a log of requests."""

    log: str | None
    gpu: str | None
    max_sequences: int | None
    max_batch_tokens: int | None
    kv_tokens: int | None
    memory_mib: float | None

    @property
    def is_asked(self) -> bool:
        """Whether any of the arguments was given."""
        return any(value is not None for value in vars(self).values())

    def run(self, models: tuple[str, ...], names: tuple[str, ...], output: str | None) -> int:
        """Fit the log, write the profile, and say how well the log comes out of it.

        Raises:
            InvalidInputError: arguments or lines of the log that cannot be used.
        """
        from tenuto.batching.fitting.from_requests import fit_requests
        from tenuto.batching.fitting.request_file import read_requests

        problems = []
        if self.log is None:
            cure = "Give the log, or leave these options away."
            problems.append(Problem("--from-requests", None, "is missing beside options that belong to it", cure))
        if models:
            cure = "Name the model with --name."
            problems.append(Problem("MODEL", " ".join(models), "is measured, which --from-requests does not do", cure))
        if self.log is not None and self.gpu is None:
            problems.append(Problem("--gpu", None, "is missing", "Give the type that served, such as --gpu a100."))
        if self.log is not None and len(names) != 1:
            problems.append(Problem("--name", " ".join(names) or None, "must name one model", "Give --name MODEL."))
        for key in ("max_sequences", "max_batch_tokens", "kv_tokens", "memory_mib"):
            value = getattr(self, key)
            if value is not None and not value >= 1:
                problems.append(Problem(_option(key), value, "must be at least 1", "Give the engine's own limit."))
        batch = self.max_batch_tokens or 2048
        if self.max_sequences is not None and batch < self.max_sequences:
            rule = f"is above --max-batch-tokens ({batch}), so that a step cannot decode all sequences"
            problems.append(Problem("--max-sequences", self.max_sequences, rule, "Lower it, or raise the other."))
        raise_if_any(problems)
        log, kind, name = read_requests(str(self.log)), str(self.gpu), names[0]
        notice(f"fitting {len(log)} requests; this takes up to a minute or two")
        fitted = fit_requests(log, max_sequences=self.max_sequences, max_batch_tokens=batch, kv_tokens=self.kv_tokens)
        profile = Profile(
            name=f"{name}-{kind}",
            gpu_type=kind,
            source=f"fitted to {len(log)} requests of {Path(str(self.log)).name}",
            measured=Measured(
                hardware=kind, date=datetime.now(UTC).date().isoformat(), command=shlex.join(command_line())
            ),
            memory_mib=self.memory_mib or memory_mib_of(kind),
            models={name: ModelProfile(generation=fitted.generation, doubts=tuple(fitted.warnings))},
        )
        if not _hand_over(profile, output):
            cost = fitted.generation.cost()
            kv = fitted.generation.kv_tokens
            say(
                f"{name} on {kind}: a step takes {cost.ms(0, 1):.2f} ms with one sequence, {cost.ms(0, 32):.2f} with "
                f"32, {cost.ms(512):.2f} with 512 prompt tokens; memory for "
                + (f"{kv:,} tokens" if kv is not None else "tokens was never short")
            )
            say(f"at most {fitted.max_sequences} sequences and {batch} tokens a step")
            errors = ", ".join(f"{key} {value:+.2f} %" for key, value in fitted.errors_pct.items())
            say(f"the log's means come out with these errors: {errors}")
        return 0

    def measure(self, models: tuple[str, ...], output: str | None, asked: Mapping[str, Any]) -> int:
        """Time the steps of one model on this machine, and say what they took. The profile is written each time that
        more is known.

        Raises:
            InvalidInputError: arguments that cannot be used, or a model that is not there or makes no tokens.
            EnvironmentFaultError: the model does not fit this machine's libraries or memory.
        """
        problems = [
            Problem(_option(key), getattr(self, key), "belongs to --from-requests", "Leave it out.")
            for key in ("log", "gpu", "kv_tokens", "memory_mib")
            if getattr(self, key) is not None
        ]
        problems += [
            Problem(option, asked[key], "is not for --generates", "Leave it out; Ctrl-C keeps what was measured.")
            for option, key in (("--time-limit-s", "time_limit_s"), ("--adaptive", "tolerance_pct"))
            if asked[key]
        ]
        if len(models) != 1:
            problems.append(Problem("MODEL", " ".join(models) or None, "must be one model", "Name one model."))
        shares = tuple(dict.fromkeys(asked["shares"]))
        if not shares or not all(0 < share <= 100 for share in shares):
            rule = "shares are above 0, up to 100 (percent)"
            problems.append(Problem("--shares", list(asked["shares"]), rule, "Write 50,100."))
        sequences, batch = self.max_sequences or 16, self.max_batch_tokens or 512
        if not 1 <= sequences <= batch:
            rule = f"must be from 1 to --max-batch-tokens ({batch})"
            problems.append(Problem("--max-sequences", sequences, rule, "Lower it, or raise the other."))
        raise_if_any(problems)
        from tenuto.profiles.measuring.book import ProfileBook
        from tenuto.profiles.measuring.events import Machine
        from tenuto.profiles.measuring.measure import STOPPED, Measurement, MeasureRequest
        from tenuto.profiles.measuring.step_worker import StepRequest, StepsTimed, measure_generation

        (source,) = models
        name = (asked["names"] or (Path(source).name,))[0]
        origin = f"options of {source}"
        options = ModelOptions.parse(parse_pairs(asked["options"]), origin).checked_build(origin)
        path = None if output is None else Path(output)
        book = ProfileBook(path, command=shlex.join(command_line()), resume=asked["resume"])
        known = book.before(name, MeasureRequest(source))
        before = () if known is None or known.generation is None else known.generation.steps
        told = () if known is None else known.doubts
        before = tuple(steps for steps in before if _stopped_at(steps.share_pct) not in told)
        left = tuple(share for share in shares if share not in {steps.share_pct for steps in before})

        is_kept = not left

        def keep(machine: Machine, timed: Sequence[StepsTimed]) -> None:
            nonlocal is_kept
            book.machine(machine)
            doubts = [doubt for doubt in told if any(doubt.startswith(f"{s.share_pct:g} %: ") for s in before)]
            doubts += [
                f"{each.steps.share_pct:g} %: other work disturbed {', '.join(each.disturbed)}"
                for each in timed
                if each.disturbed
            ]
            doubts += [_stopped_at(each.steps.share_pct) for each in timed if not each.is_whole]
            doubts += [STOPPED] if len(timed) < len(left) else []
            one = timed[0]
            steps = sorted((*before, *(each.steps for each in timed)), key=lambda steps: -steps.share_pct)
            generation = Generation(
                kv_bytes_per_token=one.kv_bytes_per_token, longest_context=one.longest_context, steps=tuple(steps)
            )
            row = ModelProfile(weights_mib=round(one.weights_mib, 3), generation=generation, doubts=tuple(doubts))
            book.finish(Measurement(name, row, machine))
            is_kept = True

        same = {key: asked[key] for key in ("device", "budget_s", "weights_path", "seed")}
        request = StepRequest(source, sequences, batch, shares=left, config=options.config, **same)
        fault: BaseException | None = None
        if left:
            try:
                with shares_of(asked["device"], needed=min(left) < 100) as given:
                    measure_generation(
                        request, shares=given, on_step=lambda what, ms: notice(f"{what}: {ms:.2f} ms"), on_steps=keep
                    )
            except (KeyboardInterrupt, TenutoError) as raised:
                fault = raised
        if book.profile is None or not is_kept:
            raise fault or EnvironmentFaultError("nothing was measured")
        _say_of(book.profile, book.path)
        if isinstance(fault, TenutoError):
            notice(f"error: {fault}")
            return fault.exit_code
        return 130 if fault is not None else 0


def _stopped_at(share_pct: float) -> str:
    from tenuto.profiles.measuring.measure import STOPPED

    return f"{share_pct:g} %: {STOPPED}"


def _option(key: str) -> str:
    return "--from-requests" if key == "log" else f"--{key.replace('_', '-')}"


def _hand_over(profile: Profile, output: str | None) -> bool:
    """Write a profile and say what it doubts; return whether it was printed as JSON, too."""
    path = Path(output or f"profile-{profile.gpu_type}.yaml")
    write_whole(path, profile.dump())
    return _say_of(profile, path)


def _say_of(profile: Profile, path: Path) -> bool:
    """Say what a profile that was written doubts; return whether it was printed as JSON, too."""
    for model in profile.models.values():
        for doubt in model.doubts:
            notice(f"warning: {doubt}")
    notice(f"wrote {path}")
    return printed_as_json(profile.model_dump(mode="json", by_alias=True, exclude_none=True))


from_requests_arguments = gathered(
    FromRequests,
    "served",
    click.option(
        "--from-requests",
        "log",
        metavar="FILE",
        help="Log of served requests instead of a measurement: a CSV with queued_s, input_tokens, output_tokens, "
        "first_token_s and last_token_s.",
    ),
    click.option("--gpu", metavar="TYPE", help="GPU type that served the log."),
    click.option(
        "--max-sequences", type=int, metavar="N", help="The engine's limit. Default: 256, or less if the log shows it."
    ),
    click.option("--max-batch-tokens", type=int, metavar="N", help="The engine's limit. Default: 2048."),
    click.option("--kv-tokens", type=int, metavar="N", help="Tokens its KV cache holds. Default: as the log shows."),
    click.option("--memory-mib", type=float, metavar="MIB", help="Memory of the GPU, for types not known by name."),
)
