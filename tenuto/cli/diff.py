"""`tenuto diff`: what a change of plan does to each gpu-let, and in which steps."""

from __future__ import annotations

import click

from tenuto.cli.common import json_option, printed_as_json, say
from tenuto.cli.deploying import address_option, left_open, operations, read_deployment, settings_shown
from tenuto.cli.tables import print_table


@click.command("diff", short_help="Show what a change to a plan does to each gpu-let.")
@click.argument("plan_file", metavar="PLAN")
@click.option("--from", "from_file", metavar="FILE", help="Plan to change from. Default: the plan that runs.")
@address_option
@json_option
def command(plan_file: str, from_file: str | None, address: str | None) -> None:
    """Show what `tenuto deploy PLAN` would do: which gpu-lets keep their process, change in place, start and stop.

    Example: tenuto diff new.yaml --from old.yaml
    """
    from tenuto.deployments.control.change_preview import preview_change
    from tenuto.placement.planner.change_stages import CUTTING_S

    wanted, kept = read_deployment(plan_file), left_open()
    if from_file is not None:
        found = preview_change(read_deployment(from_file), wanted, kept)
    else:
        with operations(address) as running:
            found = running.preview(wanted, kept)
    if printed_as_json(found):
        return
    print_table(
        ("gpu-let", "change", "why"),
        ((c.gpulet, c.kind, "; ".join(c.reasons) or "-") for c in found.changes),
        left=("change", "why"),
    )
    for layout in found.layouts:
        ends = f"{', '.join(layout.emptied)} must end first" if layout.emptied else "nothing has to end for it"
        carries = f", which carry {layout.rate_rps:,.4g} rps" if layout.rate_rps else ""
        cut = f"{' + '.join(layout.before) or 'free slices'} → {' + '.join(layout.after)}"
        say(f"{layout.gpu} is cut anew: {cut}: {ends}{carries}; about {CUTTING_S:g} s beside the starts")
    for number, step in enumerate(found.steps, 1):
        starting = ", ".join(step.starting) or "nothing"
        loss = f"; unserved meanwhile: {', '.join(step.unserved)}" if step.unserved else ""
        say(f"step {number} of {len(found.steps)}: {starting} starts or loads{loss}")
    if found.drained:
        say(f"drained: {', '.join(found.drained)}")
    if found.undrained:
        say(f"drained no more: {', '.join(found.undrained)}; `tenuto deploy` asks for --yes")
    if found.lost:
        say(f"no longer served: {', '.join(found.lost)}; `tenuto deploy` asks for --yes")
    for text in settings_shown(found):
        say(text)
    if found.changes_nothing:
        say("nothing changes")
