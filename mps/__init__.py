"""GPUs of a machine, and CUDA MPS: the daemons, shares and proofs behind gpu-lets on real hardware."""

from tenuto.mps.control import Control, ControlError
from tenuto.mps.daemon import PrivateDaemon
from tenuto.mps.folders import find_leftovers
from tenuto.mps.inventory import GpuDevice, read_inventory
from tenuto.mps.share import Report, client_environment, verify_attachment

__all__ = [
    "Control",
    "ControlError",
    "GpuDevice",
    "PrivateDaemon",
    "Report",
    "client_environment",
    "find_leftovers",
    "read_inventory",
    "verify_attachment",
]
