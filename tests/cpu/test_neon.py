"""The NEON kernel, under emulation where there is no ARM processor."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"


@pytest.mark.skipif(
    not (shutil.which(COMPILER) and shutil.which(EMULATOR)),
    reason=f"needs {COMPILER} and {EMULATOR} (Debian: g++-aarch64-linux-gnu, qemu-user)",
)
@pytest.mark.skipif(not (ROOT / "csrc").is_dir(), reason="needs the source tree")
def test_neon_under_emulation(tmp_path):
    program = tmp_path / "other_processor"
    sources = [Path(__file__).with_name("other_processor.cpp"), *ROOT.glob("csrc/cpu/*.cpp")]
    flags = ["-std=c++17", "-O1", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror", "-static"]
    subprocess.run([COMPILER, *flags, *map(str, sources), "-o", str(program)], check=True)
    done = subprocess.run([EMULATOR, program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert "neon: " in done.stdout
