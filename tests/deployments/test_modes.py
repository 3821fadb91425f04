from typing import Any

import pytest

from tenuto.deployments.gpulet.modes import describe_mode, mode_of

MODELS: dict[str, dict[str, Any]] = {
    "a": {"options": {"compile": True}}, "b": {"options": {"cuda_graphs": True}}, "c": {"options": {}}, "d": {},
    "e+f": {"members": [{}, {}]},
}  # fmt: skip


def test_every_model_is_said_to_run_as_it_does() -> None:
    mode = mode_of(MODELS, is_shared=True, is_streaming=True, is_emulated=False)
    assert mode["programs"] == {"a": "compile", "b": "cuda_graphs", "c": "plain", "d": "plain", "e+f": "merged"}
    assert describe_mode(mode) == "share, streaming, compile, cuda_graphs, merged"


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("streaming", [False, True])
def test_the_four_modes(share: bool, streaming: bool) -> None:
    mode = mode_of({"c": {}}, is_shared=share, is_streaming=streaming, is_emulated=False)
    assert (mode["share"], mode["streaming"]) == (share, streaming)
    expected = ", ".join(["share"] * share + ["streaming"] * streaming) or "plain"
    assert describe_mode(mode) == expected


def test_what_is_emulated_claims_no_program() -> None:
    assert set(mode_of(MODELS, is_shared=False, is_streaming=False, is_emulated=True)["programs"].values()) == {
        "emulated"
    }
