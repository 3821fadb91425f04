"""One process of a co-run on the GPU of virtual time; the clocks of all begin at zero."""

import torch

from tenuto_lab.interference import co_run_worker
from tests.instruments.virtual_gpu import VirtualGpu


def main() -> None:
    torch.set_num_threads(1)
    with VirtualGpu().installed() as gpu:
        co_run_worker.main(clock_s=gpu.clock_s)
