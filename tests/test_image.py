"""The image, built and served from: `scripts/test tests/test_image.py --image`, as root, with buildah and mmdebstrap.

It takes ten minutes, so that no run without `--image` builds it. No container runtime is needed: `unshare` and `chroot`
run the file system of the image, read-only, as the user of the image, and its first process is process 1.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tenuto.deployments.serve.launcher import unused_port
from tests.instruments.live import PATIENCE_S, infer

ROOT = Path(__file__).parents[1]
WORKLOAD = "models: [{name: m, rate_rps: 20, slo_ms: 500, latency: {alpha_ms: 1, beta_ms: 10}}]\n"
MOST_MIB = 450

pytestmark = pytest.mark.image


@dataclass(frozen=True)
class Image:
    """What `scripts/image` left: a file system and its configuration."""

    root: Path
    config: dict[str, Any]

    def command(self, *words: str, files: Path) -> list[str]:
        """What runs words as the image's entry point does; `files` are seen in /mnt."""
        user = self.config["User"]
        script = (
            'mount --bind "$1" "$1" && mount --bind "$2" "$1/mnt" && mount -o remount,ro,bind "$1" && '
            'mount -t tmpfs tmpfs "$1/tmp" && mount -t tmpfs tmpfs "$1/dev" && mkdir -m 1777 "$1/dev/shm" && '
            "for each in null zero urandom random; do "
            'touch "$1/dev/$each" && mount --bind "/dev/$each" "$1/dev/$each"; done && '
            'mount -t proc proc "$1/proc" && root=$1 && user=$3 && shift 3 && '
            'exec chroot --userspec="$user" "$root" /usr/bin/env -i "$@"'
        )
        separate = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--propagation", "private"]
        return [
            *separate,
            *("sh", "-c", script, "sh", str(self.root), str(files), user),
            *self.config["Env"],
            *self.config["Entrypoint"],
            *words,
        ]


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Image]:
    missing = [name for name in ("buildah", "mmdebstrap", "unshare", "chroot") if shutil.which(name) is None]
    if missing or os.geteuid() != 0:
        pytest.skip(f"needs {' and '.join(missing) or 'root'}")
    folder = tmp_path_factory.mktemp("image") / "root"
    built = os.environ.get("TENUTO_IMAGE_ROOT")  # one that `scripts/image` made before
    if built:
        folder = Path(built)
    else:
        subprocess.run([ROOT / "scripts" / "image", folder], check=True, cwd=ROOT)
    yield Image(folder, json.loads(folder.with_name(f"{folder.name}.json").read_text()))
    if not built:
        shutil.rmtree(folder)


def test_it_is_small_without_torch(image: Image) -> None:
    used = {}
    for folder, _, files in os.walk(image.root):
        for name in files:
            found = os.lstat(Path(folder) / name)
            used[found.st_ino] = found.st_size
    assert sum(used.values()) / 2**20 <= MOST_MIB


def test_it_serves_as_a_user_from_a_read_only_root_and_ends_when_told(image: Image, tmp_path: Path) -> None:
    assert image.config["User"] == "1000:1000"
    assert image.config["StopSignal"] == "SIGTERM"
    (tmp_path / "workload.yaml").write_text(WORKLOAD)
    words = ["plan", "workload.yaml", "--policy", "gpulet", "--gpus", "v100:1", "-o", "plan.yaml"]
    subprocess.run([Path(sys.executable).with_name("tenuto"), *words], check=True, cwd=tmp_path)
    tmp_path.chmod(0o755)
    port = unused_port()
    serve = ["serve", "/mnt/plan.yaml", "--emulate", "--port", str(port)]
    process = subprocess.Popen(image.command(*serve, files=tmp_path), stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        said = []
        while "serving at" not in "".join(said[-1:]):
            said.append(process.stderr.readline())
            assert said[-1], said  # it has ended
        assert infer(f"http://127.0.0.1:{port}", "m")[0] == 200
        (first,) = _children(process.pid)
        status = Path(f"/proc/{first}/status").read_text()
        assert "Uid:\t1000\t1000\t1000\t1000" in status
        os.kill(first, signal.SIGTERM)
        process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0
    finally:
        process.kill()


def _children(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
