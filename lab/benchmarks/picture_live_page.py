"""Take the pictures of the live page that docs/reference/watching.md shows: 50 models on 100 gpu-lets, light and dark.

Run with `python -m lab.benchmarks.picture_live_page FOLDER`; needs Chromium in the path.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from PIL import Image

from tenuto.deployments.serve.endpoint import get_json
from tests.deployments.operator.test_live_page import operators_port
from tests.instruments.chromium import picture
from tests.instruments.shown_status import ShownServer

_LOOKED_S = 20.0  # so that curves have some points
_COLOURS = 128


def main() -> None:
    """Let a made-up server run, and look at it."""
    folder = Path(sys.argv[1])
    shown = ShownServer(models=50, gpulets=100)
    with operators_port(shown) as url:
        until = time.monotonic() + _LOOKED_S
        while time.monotonic() < until:
            time.sleep(1.0)
            get_json(f"{url}/live")
        for name, is_dark in (("live-page.png", False), ("live-page-dark.png", True)):
            picture(url, folder / name, is_dark=is_dark)
            with Image.open(folder / name) as taken:
                taken.quantize(_COLOURS).save(folder / name, optimize=True)


if __name__ == "__main__":
    main()
