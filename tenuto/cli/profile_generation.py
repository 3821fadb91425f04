"""`tenuto profile --generates`: time the steps of a model that generates, and write what they cost."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tenuto.cli.common import command_line, notice, printed_as_json
from tenuto.documents import parse_pairs
from tenuto.errors import EnvironmentFaultError, Problem, TenutoError, raise_if_any
from tenuto.mps.gpu_shares import shares_of
from tenuto.profiles import Generation, ModelProfile, Profile
from tenuto.profiles.networks.model_options import ModelOptions


def measure_steps(models: tuple[str, ...], output: str | None, settings: Mapping[str, Any]) -> int:
    """Time the steps of one model on this machine, and say what they took. The profile is written each time that
    more is known.

    Raises:
        InvalidInputError: arguments that cannot be used, or a model that is not there or makes no tokens.
        EnvironmentFaultError: the model does not fit this machine's libraries or memory.
    """
    problems = []
    if settings["time_limit_s"]:
        rule, cure = "is not for --generates", "Leave it out; Ctrl-C keeps what was measured."
        problems.append(Problem("--time-limit-s", settings["time_limit_s"], rule, cure))
    if len(models) != 1:
        problems.append(Problem("MODEL", " ".join(models) or None, "must be one model", "Name one model."))
    shares = tuple(dict.fromkeys(settings["shares"]))
    if not shares or not all(0 < share <= 100 for share in shares):
        rule = "shares are above 0, up to 100 (percent)"
        problems.append(Problem("--shares", list(settings["shares"]), rule, "Write 50,100."))
    sequences = settings["max_sequences"] or 16  # default: as the options say
    batch = settings["max_batch_tokens"] or 512  # default: likewise
    if not 1 <= sequences <= batch:
        rule = f"must be from 1 to --max-batch-tokens ({batch})"
        problems.append(Problem("--max-sequences", sequences, rule, "Lower it, or raise the other."))
    raise_if_any(problems)
    from tenuto.profiles.measuring.events import Machine
    from tenuto.profiles.measuring.measure import STOPPED, Measurement, MeasureRequest
    from tenuto.profiles.measuring.profile_writer import ProfileWriter
    from tenuto.profiles.measuring.step_worker import StepRequest, StepsTimed, measure_generation

    (source,) = models
    name = (settings["names"] or (Path(source).name,))[0]
    origin = f"options of {source}"
    options = ModelOptions.parse(parse_pairs(settings["options"]), origin).checked_build(origin)
    path = None if output is None else Path(output)
    writer = ProfileWriter(path, command=shlex.join(command_line()), resume=settings["resume"])
    known = writer.before(name, MeasureRequest(source))
    before = () if known is None or known.generation is None else known.generation.steps
    doubts_before = () if known is None else known.doubts
    before = tuple(steps for steps in before if _stopped_at(steps.share_pct) not in doubts_before)
    left = tuple(share for share in shares if share not in {steps.share_pct for steps in before})

    is_kept = not left

    def keep(machine: Machine, timed: Sequence[StepsTimed]) -> None:
        nonlocal is_kept
        writer.machine(machine)
        doubts = [doubt for doubt in doubts_before if any(doubt.startswith(f"{s.share_pct:g} %: ") for s in before)]
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
        writer.finish(Measurement(name, row, machine))
        is_kept = True

    same = {key: settings[key] for key in ("device", "budget_s", "weights_path", "seed")}
    request = StepRequest(source, sequences, batch, shares=left, config=options.config, **same)
    fault: BaseException | None = None
    if left:
        try:
            with shares_of(settings["device"], needed=min(left) < 100) as given:
                measure_generation(
                    request, shares=given, on_step=lambda what, ms: notice(f"{what}: {ms:.2f} ms"), on_steps=keep
                )
        except (KeyboardInterrupt, TenutoError) as raised:
            fault = raised
    if writer.profile is None or not is_kept:
        raise fault or EnvironmentFaultError("nothing was measured")
    report_profile(writer.profile, writer.path)
    if isinstance(fault, TenutoError):
        notice(f"error: {fault}")
        return fault.exit_code
    return 130 if fault is not None else 0


def _stopped_at(share_pct: float) -> str:
    from tenuto.profiles.measuring.measure import STOPPED

    return f"{share_pct:g} %: {STOPPED}"


def report_profile(profile: Profile, path: Path) -> bool:
    """Print what a profile that was written doubts; return whether it was printed as JSON, too."""
    for model in profile.models.values():
        for doubt in model.doubts:
            notice(f"warning: {doubt}")
    notice(f"wrote {path}")
    return printed_as_json(profile.model_dump(mode="json", by_alias=True, exclude_none=True))
