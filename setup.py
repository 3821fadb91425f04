"""Builds Tenuto; with TENUTO_COMPILE=1 the scheduler and its rehearsals become machine code.

mypyc makes it, from the same sources. Without that, and in an editable install, everything is Python: `scripts/wheel`.
"""

import os
import sys

from setuptools import Extension, setup

COMPILED = {
    "batching/core": "by_deadline gathering gpulets scheduler staggered symphony system",
    "batching/core/deferred": (
        "allowance cut deferring due joining keeping_free lineup looking loss offered_load offline recent_losses"
        " waiting"
    ),
    "batching/rehearsal": "budget memory observer replay",
}


def machine_code() -> list[Extension]:
    """Return the modules of `COMPILED` as extensions."""
    from mypyc.build import mypycify

    files = [f"tenuto/{folder}/{name}.py" for folder, names in COMPILED.items() for name in names.split()]
    return mypycify(["--config-file", "pyproject.toml", *files], opt_level="3", debug_level="0", group_name="tenuto")


# Setuptools runs this file for the names and versions in the wheel too, which machine code changes nothing of.
is_built = bool(os.environ.get("TENUTO_COMPILE")) and "bdist_wheel" in sys.argv
setup(ext_modules=machine_code() if is_built else [])
