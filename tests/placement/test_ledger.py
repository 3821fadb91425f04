"""Memory caps of gpu-lets beside others that have theirs already."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tenuto.placement import Cluster, Gpulet, Plan, Replica
from tenuto.placement.ledger import with_caps
from tenuto.placement.plan import PlannedGpu, PolicyUsed
from tenuto.placement.planner.change_stages import fits
from tenuto.placement.rules import room_problems

CONTEXT_MIB = 300.0
gpulets = st.lists(st.tuples(st.floats(50.0, 6_000.0), st.none() | st.floats(1.0, 3.0)), min_size=1, max_size=4)


@given(gpulets)
def test_a_cap_that_is_there_stays_and_new_ones_fit_beside_it_where_their_needs_do(
    asked: list[tuple[float, float | None]],
) -> None:
    on = Cluster.parse("v100:1")
    size_mib = on.gpus[0].memory_mib
    needs = [held + CONTEXT_MIB for held, _ in asked]
    caps = [None if more is None else need * more for need, (_, more) in zip(needs, asked, strict=True)]
    held = tuple(
        Gpulet(id=f"n0/0/{i}", gpu="n0/0", memory_mib=cap, models=(Replica(name="m", batch_size=1, memory_mib=mib),))
        for i, (cap, (mib, _)) in enumerate(zip(caps, asked, strict=True))
    )
    plan = Plan(policy=PolicyUsed(name="hand"), gpus=tuple(map(PlannedGpu.of, on.gpus)), gpulets=held)
    capped = with_caps(plan, on, {"v100": CONTEXT_MIB}).gpulets
    found = [gpulet.memory_mib or 0.0 for gpulet in capped]
    for need, before, after in zip(needs, caps, found, strict=True):
        assert after == before if before is not None else after >= need - 1e-3
    gpu = on.gpus[0]
    is_refused = room_problems({gpu.id: capped}, {gpu.id: size_mib}, overcommits=False, unrestricted_pct=0.0)
    assert fits(capped, gpu, overcommits=True) == (not is_refused)
    if sum(cap or need for need, cap in zip(needs, caps, strict=True)) <= size_mib:
        assert sum(found) <= size_mib + 1e-2


def test_what_may_be_deployed_has_room_in_a_change_though_caps_are_rounded() -> None:
    on = Cluster.parse("a100-80gb:1")
    held = (Gpulet(id=f"n0/0/{i}", gpu="n0/0", share_pct=30.0, memory_mib=27306.667, models=()) for i in range(3))
    assert fits(held, on.gpus[0])
