"""gpulet's linear interference model: the slowdown from the L2 and DRAM utilisation of two gpu-lets.

Source: Choi et al., gpulet (USENIX ATC 2022; arXiv "Multi-model Machine Learning Inference Serving with GPU Spatial
Partitioning"), section 4.3; the constants of the paper's GPUs and the rule for several neighbours from its repository.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tenuto.placement.interference.interference_model import Resident
from tenuto.placement.interference.utilisation import utilisation


@dataclass(frozen=True)
class GpuletLinear:
    """factor = c1*l2_own + c2*l2_other + c3*dram_own + c4*dram_other + c5, at least 1; the largest pairwise factor.

    Utilisations are fractions of the GPU's peak, measured alone: metrics `l2_util_pct` and `dram_util_pct` of the
    profile. Of several neighbours only the one that disturbs most counts (the rule of gpulet's repository). So in this
    model a third gpu-let never costs more than the second.

    `whole_gpu`: False when utilisations were measured on the share; True when they were measured on the whole GPU and
    are multiplied by the share, as in gpulet's repository.
    """

    l2_own: float
    l2_other: float
    dram_own: float
    dram_other: float
    constant: float
    whole_gpu: bool = False

    def slowdown(self, gpulet: Resident, neighbours: Sequence[Resident]) -> float:
        """Return the factor; see `InterferenceModel.slowdown`."""
        if not neighbours:
            return 1.0
        l2, dram = l2_and_dram(gpulet, self.whole_gpu)
        others = [l2_and_dram(other, self.whole_gpu) for other in neighbours]
        worst = max(self.l2_other * other_l2 + self.dram_other * other_dram for other_l2, other_dram in others)
        return max(1.0, self.l2_own * l2 + self.dram_own * dram + worst + self.constant)


def l2_and_dram(resident: Resident, whole_gpu: bool) -> tuple[float, float]:
    """Return L2 and DRAM utilisation as fractions; raise `MissingProfileError` when they were not measured."""
    alone = replace(resident, share_pct=100.0) if whole_gpu else resident
    scale = resident.share_pct / 100.0 if whole_gpu else 1.0
    return scale * utilisation(alone, "l2_util_pct"), scale * utilisation(alone, "dram_util_pct")


# All 1,200 slowdowns of the 600 V100 pairs of the iGniter repository (commit b1ff2ab), alone latencies and
# utilisations from profile igniter-v100. lab/benchmarks/bench_interference.py judges the fit on pairs left out.
V100 = GpuletLinear(-0.01678401, -0.00995225, -0.03668265, 0.12518395, 1.08423643)

# Published in gpulet's repository (casys-kaist/glet, commit 3c1c2aa), for utilisations of the whole GPU.
CONSTANTS = {
    "v100": V100,
    "2080ti": GpuletLinear(0.11290839, 0.71595987, 0.35486592, 0.088203826, 0.89536939, whole_gpu=True),
    "3080": GpuletLinear(-0.17988746, 0.03840912, 0.12551833, -0.056482059, 1.0184271, whole_gpu=True),
}
