"""A real browser without a window: what a page shows after its script has run, and a picture of it."""

import shutil
import subprocess
import tempfile
from pathlib import Path

__all__ = ["find_chromium", "picture", "shown_dom"]


def find_chromium() -> str | None:
    """The distribution's Chromium, where there is one."""
    names = ("chromium", "chromium-browser", "google-chrome")
    return next((path for name in names if (path := shutil.which(name))), None)


def shown_dom(url: str) -> tuple[str, list[str]]:
    """Return the document as it stands a few virtual seconds after loading, and what went to the console."""
    result = _run("--dump-dom", url)
    errors = [line for line in result.stderr.splitlines() if "CONSOLE" in line]
    return result.stdout, errors


def picture(url: str, file: Path, *, width: int = 1500, height: int = 1600, is_dark: bool = False) -> None:
    """Write a PNG of a page."""
    dark = ["--force-dark-mode", "--enable-features=WebContentsForceDark:inversion_method/none"] if is_dark else []
    _run(f"--screenshot={file}", f"--window-size={width},{height}", "--hide-scrollbars", *dark, url)


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    chromium = find_chromium()
    assert chromium is not None
    with tempfile.TemporaryDirectory() as profile:
        return subprocess.run(
            [
                chromium,
                "--headless=new",
                "--no-sandbox",
                "--disable-gpu",
                "--disable-dev-shm-usage",
                "--no-first-run",
                "--disable-background-networking",
                "--disable-extensions",
                "--enable-logging=stderr",
                "--v=0",
                f"--user-data-dir={profile}",
                "--virtual-time-budget=4000",
                *arguments,
            ],
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
