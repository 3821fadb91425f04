from tenuto.deployments.operator.mps_notes import describe_share, sharing_notes

GIVEN = {"sm_count": 32, "gpu_sm_count": 80, "proof": "pid", "others": []}


def test_a_share_is_told_as_planned_and_as_given() -> None:
    assert describe_share({"share_pct": 40.0, "cuda_mps": GIVEN}) == "40 % (32/80 SMs)"
    assert describe_share({"share_pct": 40.0, "cuda_mps": None}) == "40 %"
    assert describe_share({"share_pct": None}) == "-"  # down, or a whole GPU


def test_only_what_is_unusual_is_noted() -> None:
    other = {"pid": 7, "name": "python", "user": 1001}
    unusual = {**GIVEN, "proof": "the only client that came during its start", "others": [other]}
    usual, gone = {"id": "n0/0/a", "cuda_mps": GIVEN}, {"id": "n0/0/b"}
    first, second = sharing_notes([usual, gone, {"id": "n0/0/c", "cuda_mps": unusual}])
    assert first == "n0/0/c: its attachment to CUDA MPS was proved by: the only client that came during its start"
    assert second.endswith("process 7 (python, user 1001)")
