"""Memory caps of gpu-lets beside others that have theirs already."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tenuto.placement import Cluster, Gpulet, Plan, Replica
from tenuto.placement.ledger import with_caps
from tenuto.placement.plan import PlannedGpu, PolicyUsed

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
    found = [gpulet.memory_mib or 0.0 for gpulet in with_caps(plan, on, {"v100": CONTEXT_MIB}).gpulets]
    for need, before, after in zip(needs, caps, found, strict=True):
        assert after == before if before is not None else after >= need - 1e-3
    if sum(cap or need for need, cap in zip(needs, caps, strict=True)) <= size_mib:
        assert sum(found) <= size_mib + 1e-2
