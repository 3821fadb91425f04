import pytest

from tenuto.deployments.gpulet.modes import describe_mode, mode_of
from tenuto.deployments.serve.user_config import MemberEntry, ProgramEntry
from tests.deployments.programs import lone

PROGRAMS = [
    lone("a", options={"compile": True}),
    lone("b", options={"cuda_graphs": True}),
    lone("c"),
    ProgramEntry(name="e+f", batch_size=1, members=(MemberEntry(name="e"), MemberEntry(name="f"))),
]


def test_every_model_is_said_to_run_as_it_does() -> None:
    mode = mode_of(PROGRAMS, is_shared=True, is_streaming=True, is_emulated=False)
    assert mode.programs == {"a": "compile", "b": "cuda_graphs", "c": "plain", "e+f": "merged"}
    assert describe_mode(mode.to_data()) == "share, streaming, compile, cuda_graphs, merged"


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("streaming", [False, True])
def test_the_four_modes(share: bool, streaming: bool) -> None:
    mode = mode_of([lone("c")], is_shared=share, is_streaming=streaming, is_emulated=False)
    assert (mode.share, mode.streaming) == (share, streaming)
    expected = ", ".join(["share"] * share + ["streaming"] * streaming) or "plain"
    assert describe_mode(mode.to_data()) == expected


def test_what_is_emulated_claims_no_program() -> None:
    mode = mode_of(PROGRAMS, is_shared=False, is_streaming=False, is_emulated=True)
    assert set(mode.programs.values()) == {"emulated"}
