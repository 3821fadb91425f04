"""The public names: each can be imported, is listed, and loads nothing but its own room."""

import subprocess
import sys

import pytest

import tenuto


def test_every_public_name_is_there_and_in_order() -> None:
    assert list(tenuto.__all__) == sorted(tenuto.__all__, key=lambda name: (name[0].islower(), name))
    for name in tenuto.__all__:
        assert getattr(tenuto, name).__name__
    assert set(tenuto.__all__) <= set(dir(tenuto))


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Plann'"):
        _ = tenuto.Plann


@pytest.mark.parametrize(
    "steps",
    [
        (
            ("import tenuto", ("tenuto.placement", "tenuto.profiles", "pydantic")),
            ("from tenuto import Workload", ("tenuto.batching", "tenuto.deployments", "tenuto.loadgen")),
            ("import tenuto.placement", ("tenuto.batching", "tenuto.deployments", "tenuto.loadgen")),
            ("from tenuto import simulate", ("tenuto.deployments", "tenuto.loadgen", "ray", "torch")),
        ),
        # Each is a process of its own, many on one machine: scipy alone is 40 MiB and half a second.
        (("import tenuto.deployments.gpulet.replica, tenuto.deployments.entry.gateway", ("ray", "torch", "scipy")),),
    ],
)
def test_an_import_loads_no_other_room(steps: tuple[tuple[str, tuple[str, ...]], ...]) -> None:
    """One process takes the steps in order: what a step must not have loaded, none before it may have either."""
    program = "import sys\n" + "".join(
        f"{statement}\nprint([m for m in {absent!r} if m in sys.modules])\n" for statement, absent in steps
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False)
    assert (done.stdout.split(), done.stderr) == (["[]"] * len(steps), "")
