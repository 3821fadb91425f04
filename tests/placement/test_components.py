"""Which gpu-lets share models or GPUs, directly or through others."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tenuto.placement.components import connected_components, connected_with
from tenuto.placement.program import Gpulet, Replica


@given(st.lists(st.lists(st.integers(0, 12), max_size=4), max_size=8))
def test_groups_with_a_common_member_are_in_one_component_and_no_others(groups: list[list[int]]) -> None:
    components = connected_components(groups)
    expected: list[set[int]] = []
    for group in groups:
        joined = [each for each in expected if not each.isdisjoint(group)]
        expected = [each for each in expected if each not in joined] + [set(group).union(*joined)]
    assert sorted(map(sorted, components)) == sorted(sorted(each) for each in expected if each)
    first = list(dict.fromkeys(member for group in groups for member in group))
    assert [min(map(first.index, each)) for each in components] == sorted(min(map(first.index, c)) for c in components)


def test_what_a_changed_gpulet_is_connected_with_comes_in_the_order_of_the_plan() -> None:
    def gpulet(gpu: str, *models: str) -> Gpulet:
        return Gpulet(id=gpu, gpu=gpu, models=tuple(Replica(name=name, batch_size=1) for name in models))

    held = [gpulet("0", "d"), gpulet("1", "b", "c"), gpulet("2", "e"), gpulet("3", "a", "b"), gpulet("4", "c")]
    assert connected_with([gpulet("5", "a")], held) == (held[1], held[3], held[4])
    assert connected_with([gpulet("2", "d")], held) == (held[0], held[2])
    assert connected_with([gpulet("5")], held) == ()
