"""The package as it is installed: what a wheel holds, and what one sees when a part is missing."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
import torch

import trellis_ops
from trellis_ops import _binary, meta

ROOT = Path(__file__).parents[1]
FIX = "pip install --no-build-isolation -e ."


def python(*arguments: str, **settings) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, **settings)


@pytest.fixture(scope="module")
def package(tmp_path_factory) -> Path:
    """A folder with the package laid out as a wheel has it, without the library."""
    folder = tmp_path_factory.mktemp("installed")
    ignore = shutil.ignore_patterns("_C.so", "__pycache__")
    shutil.copytree(Path(trellis_ops.__file__).parent, folder / "trellis_ops", ignore=ignore)
    target = folder / "trellis_ops" / "meta"
    shutil.copytree(Path(meta.__file__).parent, target, ignore=ignore, dirs_exist_ok=True)
    return folder


# ---- without the library ----------------------------------------------------------------------


def test_the_package_works_without_the_library_and_tells_why(package):
    program = """if True:
        import torch, trellis_ops
        from trellis_ops import _binary
        print(trellis_ops.__file__)
        print(_binary.available())
        print(_binary.reason())
        states = trellis_ops.unpack_trellis(torch.zeros(1, 1, 64, dtype=torch.int16))
        print(trellis_ops.pack_trellis(states, 4).shape)
        try:
            trellis_ops.hadamard_128(torch.ones(2, 128))
        except RuntimeError as error:
            print(error)
    """
    done = python("-c", program, cwd=package)
    assert done.returncode == 0, done.stderr
    library = package / "trellis_ops" / "_C.so"
    file, available, reason, shape, error = done.stdout.splitlines()
    assert Path(file).parent == library.parent
    assert available == "False"
    assert reason == f"{library} does not exist"
    assert shape == "torch.Size([1, 1, 64])"
    assert "trellis_ops::hadamard_128" in error and reason in error and FIX in error


def test_a_file_that_is_no_library(tmp_path):
    library = tmp_path / "_C.so"
    library.write_bytes(b"not a library")
    reason = _binary.try_load(library)
    assert reason.startswith(f"{library} could not be loaded: ")
    assert "invalid ELF header" in reason or "file too short" in reason


@pytest.mark.parametrize("version", ["2.10.1+cpu", "1.13", "2.9.0a0+git1234"])
def test_an_old_torch(monkeypatch, tmp_path, version):
    monkeypatch.setattr(torch, "__version__", version)
    assert _binary.try_load(tmp_path / "_C.so") == (
        f"torch {version} is older than 2.11, the oldest that the library works with"
    )


def test_require_names_op_reason_and_fix(monkeypatch):
    monkeypatch.setattr(_binary, "_state", _binary._State(True, "the reason"))
    with pytest.raises(RuntimeError, match="trellis_ops::some_op .*the reason") as caught:
        _binary.require("some_op")
    assert FIX in str(caught.value)


def test_the_library_needs_no_python_and_no_cuda():
    if not _binary.available() or shutil.which("readelf") is None:
        pytest.skip("needs the library and readelf")
    dynamic = subprocess.run(
        ["readelf", "-d", str(_binary.path())], capture_output=True, text=True, check=True
    ).stdout
    needed = {line.split("[")[1].rstrip("]") for line in dynamic.splitlines() if "NEEDED" in line}
    system = {"libstdc++.so.6", "libgcc_s.so.1", "libm.so.6", "libc.so.6", "ld-linux-x86-64.so.2"}
    assert needed - system == {"libtorch_cpu.so"}
    assert "PATH" not in dynamic


# ---- the build --------------------------------------------------------------------------------

needs_source = pytest.mark.skipif(not (ROOT / "setup.py").is_file(), reason="needs the source tree")


@pytest.fixture
def build():
    spec = importlib.util.spec_from_file_location("trellis_ops_setup", ROOT / "setup.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@needs_source
def test_the_wheel(tmp_path):
    command = ("-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "-w", str(tmp_path))
    done = python(*command, str(ROOT))
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = tmp_path.glob("*.whl")
    name, version, *tags = path.stem.split("-")
    assert (name, version) == ("trellis_ops", trellis_ops.__version__)
    assert tags[:2] == ["py3", "none"] and tags[2].startswith("linux_")
    with zipfile.ZipFile(path) as wheel:
        names = set(wheel.namelist())
        metadata = Parser().parsestr(
            wheel.read(f"trellis_ops-{version}.dist-info/METADATA").decode()
        )
    for file in ("_C.so", "py.typed", "meta/schemas.py", "formats/checkpoint.py", "cli/env.py"):
        assert f"trellis_ops/{file}" in names
    assert {name.split("/")[0] for name in names} == {
        "trellis_ops",
        f"trellis_ops-{version}.dist-info",
    }
    assert metadata["Requires-Python"] == ">=3.10"
    assert metadata["License-Expression"] == "Apache-2.0"
    required = metadata.get_all("Requires-Dist")
    assert "torch>=2.11" in required
    assert not {"transformers", "numpy"} & {
        line.split(">")[0] for line in required if ";" not in line
    }


@needs_source
@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (
            {"CXX": "no-such-compiler -O1"},
            "trellis_ops: the C++ compiler 'no-such-compiler', named by the variable CXX, "
            "was not found.",
        ),
        (
            {"CXX": "", "PATH": "/nowhere"},
            "trellis_ops: no C++ compiler was found; install g++ "
            "(Debian, Ubuntu: apt install g++) or set CXX.",
        ),
    ],
)
def test_no_compiler(environment, message):
    done = python("setup.py", "-q", "dist_info", cwd=ROOT, env={**os.environ, **environment})
    assert (done.returncode, done.stderr.strip()) == (1, message)


@needs_source
def test_no_torch():
    # -S: no site-packages, so only setuptools is added back, as in an isolated build.
    import setuptools

    program = f"""if True:
        import sys
        sys.path.append({str(Path(setuptools.__file__).parents[1])!r})
        import importlib.util as util, runpy
        find = util.find_spec
        util.find_spec = lambda name, *rest: None if name == "torch" else find(name, *rest)
        sys.argv = ["setup.py", "-q", "dist_info"]
        runpy.run_path("setup.py", run_name="__main__")
    """
    done = python("-S", "-c", program, cwd=ROOT)
    assert done.returncode == 1
    assert done.stderr.strip() == (
        "trellis_ops: torch is not installed where this package is built. Install torch 2.11 or "
        "newer first, then run: pip install --no-build-isolation -e ."
    )


@needs_source
def test_other_things_that_a_build_may_lack(build, monkeypatch):
    monkeypatch.setattr(build.metadata, "version", lambda name: "2.10.0+cu130")
    with pytest.raises(SystemExit, match=r"needs torch 2\.11 or newer, but 2\.10\.0\+cu130 is"):
        build.find_torch()
    monkeypatch.setattr(build.shutil, "which", lambda name: None)
    monkeypatch.setattr(build.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="ninja was not found; run: pip install ninja"):
        build.find_ninja()
    monkeypatch.setattr(build.util, "find_spec", lambda name: True)
    assert build.find_ninja() == [sys.executable, "-m", "ninja"]


@needs_source
def test_flags_by_file_name(build, monkeypatch):
    monkeypatch.setattr(build, "ISA_FLAGS", {"_avx2": (True, ["-mavx2"]), "_neon": (False, [])})
    assert build.isa_flags("csrc/cpu/search_avx2.cpp") == ["-mavx2"]
    assert build.isa_flags("csrc/cpu/search_neon.cpp") is None
    assert build.isa_flags("csrc/cpu/search.cpp") == []


@needs_source
def test_cuda_architectures(build, monkeypatch):
    answers = {"nvcc": "Cuda compilation tools, release 13.0,", "nvidia-smi": "9.0\n12.0\n9.0\n"}
    monkeypatch.setattr(build, "run_text", lambda *command: answers[command[0]])
    monkeypatch.setattr(build.shutil, "which", lambda name: name)

    def flags(*names):
        return [f"-gencode=arch=compute_{name},code=sm_{name}" for name in names]

    # By default the GPUs of the machine, in their own instructions.
    monkeypatch.delenv("TRELLIS_OPS_CUDA_ARCH", raising=False)
    assert build.cuda_targets("nvcc") == flags("120", "90a")
    monkeypatch.setattr(build.shutil, "which", lambda name: None)
    assert build.cuda_targets("nvcc") == []
    monkeypatch.setenv("TRELLIS_OPS_CUDA_ARCH", "all")
    ptx = "-gencode=arch=compute_90,code=compute_90"
    assert build.cuda_targets("nvcc") == [*flags("80", "90a", "120"), ptx]
    for arch in ("90a", "sm_90a", "90", "sm_90"):
        monkeypatch.setenv("TRELLIS_OPS_CUDA_ARCH", arch)
        assert build.cuda_targets("nvcc") == flags("90a")
    monkeypatch.setenv("TRELLIS_OPS_CUDA_ARCH", "80;90")
    with pytest.raises(
        SystemExit, match="is '80;90', expected all or one architecture such as 90a"
    ):
        build.cuda_targets("nvcc")
    monkeypatch.setenv("TRELLIS_OPS_CUDA_ARCH", "all")
    answers["nvcc"] = "release 12.4, V12.4.1"
    with pytest.raises(SystemExit, match=r"nvcc 12\.4 cannot compile for sm_120"):
        build.cuda_targets("nvcc")
