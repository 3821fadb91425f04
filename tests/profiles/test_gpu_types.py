"""GPU types by the driver's names, and the multiprocessors of a share."""

import pytest

from tenuto.profiles.gpu_types import GPU_TYPES, gpu_type_of, sms_of_share


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("Tesla V100-SXM2-16GB", "v100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("Tesla P4", "p4"),
        ("NVIDIA A10G", "a10g"),
        ("NVIDIA GeForce GTX 1080 Ti", "1080ti"),
        ("NVIDIA L4", "l4"),
        ("Tesla T4", "t4"),
        ("NVIDIA A100-SXM4-40GB", "a100"),
        ("NVIDIA GeForce RTX 2080 Ti", "2080ti"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA GB200", "gb200"),
        ("Tesla K80", "k80"),
    ],
)
def test_known_products_have_our_names(name: str, kind: str) -> None:
    assert gpu_type_of(name) == kind
    assert kind in GPU_TYPES


@pytest.mark.parametrize("name", ["NVIDIA L40S", "NVIDIA A10", "NVIDIA GeForce RTX 3080 Ti", "NVIDIA TITAN X (Pascal)"])
def test_a_neighbouring_product_is_not_taken_for_a_known_one(name: str) -> None:
    assert gpu_type_of(name) not in GPU_TYPES


def test_a_mig_device_is_a_type_of_its_own() -> None:
    assert gpu_type_of("NVIDIA A100-SXM4-40GB MIG 3g.20gb") == "a100-3g.20gb"
    assert gpu_type_of("NVIDIA L40S") == "l40s"


@pytest.mark.parametrize(("share_pct", "sms"), [(100, 132), (50, 66), (25, 33), (10, 13), (1, 2), (0.1, 2)])
def test_a_share_is_rounded_down_but_never_below_one_cluster_of_two(share_pct: float, sms: int) -> None:
    assert sms_of_share(132, share_pct) == sms
