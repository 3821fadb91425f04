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

    desired, open_settings = read_deployment(plan_file), left_open()
    if from_file is not None:
        preview = preview_change(read_deployment(from_file), desired, open_settings)
    else:
        with operations(address) as running:
            preview = running.preview(desired, open_settings)
    if printed_as_json(preview):
        return
    print_table(
        ("gpu-let", "change", "why"),
        ((c.gpulet, c.kind, "; ".join(c.reasons) or "-") for c in preview.changes),
        left=("change", "why"),
    )
    for layout in preview.layouts:
        ends = f"{', '.join(layout.emptied)} must end first" if layout.emptied else "nothing has to end for it"
        carries = f", which carry {layout.rate_rps:,.4g} rps" if layout.rate_rps else ""
        cut = f"{' + '.join(layout.before) or 'free slices'} → {' + '.join(layout.after)}"
        say(f"{layout.gpu} is cut anew: {cut}: {ends}{carries}; about {CUTTING_S:g} s beside the starts")
    for number, step in enumerate(preview.steps, 1):
        starting = ", ".join(step.starting) or "nothing"
        loss = f"; unserved meanwhile: {', '.join(step.unserved)}" if step.unserved else ""
        say(f"step {number} of {len(preview.steps)}: {starting} starts or loads{loss}")
    if preview.drained:
        say(f"drained: {', '.join(preview.drained)}")
    if preview.undrained:
        say(f"drained no more: {', '.join(preview.undrained)}; `tenuto deploy` asks for --yes")
    if preview.lost:
        say(f"no longer served: {', '.join(preview.lost)}; `tenuto deploy` asks for --yes")
    for text in settings_shown(preview):
        say(text)
    if preview.changes_nothing:
        say("nothing changes")
