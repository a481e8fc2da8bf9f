"""Builds trellis_ops and its one shared library, trellis_ops/_C.so.

The library has no Python in it: torch.ops.load_library loads it, so one wheel serves every
Python 3. torch's own BuildExtension has no flags per file, so this writes a build.ninja instead;
csrc/README.md tells how to add files to it.
"""

from __future__ import annotations

import glob
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from importlib import metadata, util
from typing import NoReturn


def fail(message: str) -> NoReturn:
    raise SystemExit(f"trellis_ops: {message}")


if sys.version_info < (3, 10):  # noqa: UP036  (an old Python shall say so, and before it imports)
    fail(f"needs Python 3.10 or newer, this is {platform.python_version()}.")
if not sys.platform.startswith("linux"):
    fail(f"builds on Linux only for now, this is {platform.system()}.")

import setuptools
from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.dist_info import dist_info

MIN_TORCH = (2, 11)
MIN_SETUPTOOLS = 77
if int(setuptools.__version__.split(".")[0]) < MIN_SETUPTOOLS:
    # It could not read pyproject.toml, and would say so with a traceback.
    fail(
        f"needs setuptools {MIN_SETUPTOOLS} or newer, but {setuptools.__version__} is installed; "
        "run: pip install -U setuptools"
    )

from setuptools.command.bdist_wheel import bdist_wheel  # not there in an older one

BUILD_DIR = "build/ninja"
IS_X86 = platform.machine() in ("x86_64", "AMD64")
IS_ARM = platform.machine() in ("aarch64", "arm64")

# Endings of the CPU kernels' file names that need more than the baseline of their architecture.
# The library asks the processor before it calls into such a file, so no other file may contain
# these instructions.
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
# What one loop stores in narrower vectors, the next one's wide loads would wait for.
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"]
AVX512 += ["-mprefer-vector-width=512"]
AVX512VNNI = [*AVX512, "-mavx512vbmi", "-mavx512vnni"]
AVX512FP16 = [*AVX512VNNI, "-mavx512fp16"]
ISA_FLAGS = {
    "_avx2": (IS_X86, AVX2),
    "_avx512": (IS_X86, AVX512),
    "_avx512vnni": (IS_X86, AVX512VNNI),
    "_avx512fp16": (IS_X86, AVX512FP16),
    "_amx": (IS_X86, [*AVX512FP16, "-mamx-tile", "-mamx-int8"]),
    "_neon": (IS_ARM, []),
}

# No contraction: the generic and the vector kernels must round alike, so a fused multiply-add is
# always written out.
CXX_FLAGS = ["-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off"]
CXX_FLAGS += ["-Wall", "-Wextra", "-Icsrc"]
TORCH_FLAGS = ["-DTORCH_TARGET_VERSION=0x020b000000000000"]  # 2.11, the oldest torch to run on
CUDA_FLAGS = [
    "-std=c++17",
    "-O3",
    "--compress-mode=size",
    "-Xcompiler=-fPIC,-fvisibility=hidden",
    "-Icsrc",
]
CUDA_TARGETS = ["80", "90a", "120"]  # machine code for these, and PTX of 80 for what comes later
# No rpath: torch is loaded first, and its libtorch_cpu is then the one that answers. A CUDA
# runtime linked statically stays hidden, since torch has one of its own.
LINK_FLAGS = ["-shared", "-Wl,--as-needed", "-Wl,-z,defs", "-Wl,--exclude-libs,ALL"]


def run_text(*command: str) -> str:
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    return done.stdout


def find_torch() -> str:
    """The folder of the installed torch, which is not imported: that would take seconds."""
    spec = util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        fail(
            "torch is not installed where this package is built. Install torch 2.11 or newer "
            "first, then run: pip install --no-build-isolation -e ."
        )
    version = metadata.version("torch")
    if tuple(int(part) for part in re.findall(r"\d+", version)[:2]) < MIN_TORCH:
        fail(f"needs torch {MIN_TORCH[0]}.{MIN_TORCH[1]} or newer, but {version} is installed.")
    return next(iter(spec.submodule_search_locations))


def find_compiler() -> list[str]:
    chosen = shlex.split(os.environ.get("CXX", ""))
    if chosen:
        if shutil.which(chosen[0]) is None:
            fail(f"the C++ compiler {chosen[0]!r}, named by the variable CXX, was not found.")
        return chosen
    for name in ("g++", "clang++", "c++"):
        if shutil.which(name):
            return [name]
    fail("no C++ compiler was found; install g++ (Debian, Ubuntu: apt install g++) or set CXX.")


def find_ninja() -> list[str]:
    if shutil.which("ninja"):
        return ["ninja"]
    if util.find_spec("ninja"):
        return [sys.executable, "-m", "ninja"]
    fail("ninja was not found; run: pip install ninja")


def find_nvcc() -> str | None:
    home = os.environ.get("CUDA_HOME")
    candidates = [f"{home}/bin/nvcc"] if home else []
    candidates.append(shutil.which("nvcc") or "")
    nvidia = util.find_spec("nvidia")  # where the wheels on PyPI put it
    for folder in (nvidia.submodule_search_locations or []) if nvidia else []:
        candidates += sorted(glob.glob(f"{folder}/cu[0-9]*/bin/nvcc"), reverse=True)
    return next((path for path in candidates if os.access(path, os.X_OK)), None)


def visible_gpus() -> list[str]:
    """Architectures of this machine's GPUs, such as "90"; none where there is no driver."""
    command = ("nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader")
    if shutil.which(command[0]) is None:
        return []
    found = re.findall(r"^(\d+)\.(\d+)$", run_text(*command), re.MULTILINE)
    return sorted({major + minor for major, minor in found})


def cuda_targets(nvcc: str) -> list[str]:
    """Flags for the architectures to compile for; none: leave the CUDA kernels out.

    By default those of the GPUs at hand, since compiling for all takes minutes, which whoever has
    no GPU would wait for in vain.
    """
    release = re.search(r"release (\d+)\.(\d+)", run_text(nvcc, "--version"))
    if release is None:
        fail(f"{nvcc} --version tells no version.")
    arch = os.environ.get("TRELLIS_OPS_CUDA_ARCH", "").removeprefix("sm_")
    if arch == "all":
        if (int(release[1]), int(release[2])) < (12, 8):
            fail(
                f"nvcc {release[1]}.{release[2]} cannot compile for sm_120; use CUDA 12.8 or "
                "newer, or name one architecture, such as TRELLIS_OPS_CUDA_ARCH=90a."
            )
        names = CUDA_TARGETS
    elif arch:
        if not re.fullmatch(r"\d{2,3}[af]?", arch):
            fail(
                f"TRELLIS_OPS_CUDA_ARCH is {arch!r}, expected all or one architecture such as 90a."
            )
        names = [arch]
    else:
        names = visible_gpus()
    # Hopper's own instructions are those of 90a; a build for 90 would lack the kernels they make.
    names = [{"90": "90a"}.get(name, name) for name in names]
    flags = [f"-gencode=arch=compute_{name},code=sm_{name}" for name in names]
    # PTX for GPUs to come. Not of 80: from 90 on launches overlap, and its code would not wait.
    return [*flags, "-gencode=arch=compute_90,code=compute_90"] if arch == "all" else flags


def cuda_folders(nvcc: str) -> tuple[str, str]:
    """The folder of the CUDA headers, and that of libcudart_static.a."""
    # The program on PATH may be a wrapper, so nvcc itself is asked where its toolkit is.
    top = re.search(r"TOP=(.*)", run_text(nvcc, "--dryrun", "-x", "cu", os.devnull))
    root = os.path.realpath(top[1].strip()) if top else os.path.dirname(os.path.dirname(nvcc))
    for pattern in ("lib64", "lib", "targets/*/lib"):
        for library in glob.glob(f"{root}/{pattern}/libcudart_static.a"):
            return f"{root}/include", os.path.dirname(library)
    fail(f"libcudart_static.a was not found under {root}.")


def isa_flags(source: str) -> list[str] | None:
    """Flags for one CPU kernel; None for a file that belongs to another architecture."""
    stem = os.path.splitext(source)[0]
    for ending, (here, flags) in ISA_FLAGS.items():
        if stem.endswith(ending):
            return flags if here else None
    return []


def quote(words: list[str]) -> str:
    return shlex.join(words).replace("$", "$$")


def ninja_file(library: str) -> str:
    """The text of build.ninja. Paths are relative to the folder of setup.py, where ninja runs."""
    torch = find_torch()
    compiler = find_compiler()
    ccache = ["ccache"] if shutil.which("ccache") else []
    x86 = ["-DTRELLIS_X86"] if IS_X86 else []
    rules = {"cxx": [*ccache, *compiler, *CXX_FLAGS, *x86]}
    link_flags = [f"-L{torch}/lib", "-ltorch_cpu"]
    torch_flags = [*TORCH_FLAGS, "-isystem", f"{torch}/include"]

    units = []  # (source, rule, flags)
    for source in sorted(glob.glob("csrc/cpu/**/*.cpp", recursive=True)):
        flags = isa_flags(source)
        if flags is not None:
            units.append((source, "cxx", flags))
    cuda = sorted(glob.glob("csrc/cuda/**/*.cu", recursive=True))
    nvcc = find_nvcc() if cuda else None
    targets = cuda_targets(nvcc) if nvcc else []
    if nvcc and targets:
        include, static = cuda_folders(nvcc)
        rules["nvcc"] = [*ccache, nvcc, *CUDA_FLAGS, *targets, "-ccbin", compiler[-1]]
        units += [(source, "nvcc", []) for source in cuda]
        torch_flags += ["-DTRELLIS_CUDA", "-isystem", include]
        link_flags += [f"-L{static}", "-lcudart_static", "-ldl", "-lrt", "-lpthread"]
    elif cuda:
        reason = "no GPU was found (see TRELLIS_OPS_CUDA_ARCH)" if nvcc else "nvcc was not found"
        print(f"trellis_ops: {reason}, so the library gets no CUDA kernels.", flush=True)
    units += [(source, "cxx", torch_flags) for source in sorted(glob.glob("csrc/*.cpp"))]

    text = [f"builddir = {BUILD_DIR}"]
    for name, command in rules.items():
        text.append(f"rule {name}")
        text.append(f"  command = {quote(command)} $flags -MD -MF $out.d -c $in -o $out")
        text += [f"  description = {name} $in", "  depfile = $out.d", "  deps = gcc"]
    text.append("rule link")
    text.append(f"  command = {quote([*compiler, *LINK_FLAGS])} $in -o $out {quote(link_flags)}")
    text.append("  description = link $out")
    # Baseline first: where an inline function of a header was compiled in several files, the linker
    # keeps the first copy, and that one must run on every processor.
    units.sort(key=lambda unit: len(unit[2]) if unit[0].startswith("csrc/cpu/") else 0)
    objects = [f"{BUILD_DIR}/{source}.o" for source, _, _ in units]
    for out, (source, rule, flags) in zip(objects, units, strict=True):
        text += [f"build {out}: {rule} {source}", f"  flags = {quote(flags)}"]
    text += [f"build {library}: link {' '.join(objects)}", f"default {library}", ""]
    return "\n".join(text)


def check_requirements() -> None:
    """One sentence for what is missing, before anything is downloaded or compiled."""
    find_torch()
    find_compiler()
    find_ninja()
    if not glob.glob("csrc/*.cpp"):
        fail("this source tree is incomplete: there is no csrc/*.cpp.")


def build_library() -> str:
    check_requirements()
    library = f"{BUILD_DIR}/_C.so"
    script = f"{BUILD_DIR}/build.ninja"
    text = ninja_file(library)
    os.makedirs(BUILD_DIR, exist_ok=True)
    with open(script, "w", encoding="utf-8") as file:
        file.write(text)
    jobs = os.environ.get("MAX_JOBS")  # the name that torch's own builds use
    command = [*find_ninja(), *(["-j", jobs] if jobs else []), "-f", script]
    if subprocess.run(command, check=False).returncode != 0:
        fail("the library did not compile; the failing command and its output are above.")
    return library


def place(source: str, target: str) -> None:
    """Copies by rename, so that a process which has the old library loaded keeps it intact."""
    os.makedirs(os.path.dirname(target), exist_ok=True)
    temporary = f"{target}.{os.getpid()}.tmp"
    shutil.copyfile(source, temporary)
    os.replace(temporary, target)


class BuildLibrary(build_ext):
    def get_ext_filename(self, fullname: str) -> str:
        return fullname.replace(".", "/") + ".so"  # no Python tag, since no Python is in it

    def build_extension(self, ext: Extension) -> None:
        place(build_library(), self.get_ext_fullpath(ext.name))

    def copy_extensions_to_source(self) -> None:
        build_py = self.get_finalized_command("build_py")
        for ext in self.extensions:
            in_source, built = self._get_inplace_equivalent(build_py, ext)
            place(built, in_source)


class CheckedDistInfo(dist_info):
    """pip asks for the metadata first, and only then downloads what the metadata requires."""

    def run(self) -> None:
        check_requirements()
        super().run()


class PlatformWheel(bdist_wheel):
    def finalize_options(self) -> None:
        super().finalize_options()
        self.root_is_pure = False

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


def main() -> None:
    os.chdir(os.path.dirname(os.path.abspath(__file__)))
    sources = glob.glob("csrc/**/*.cpp", recursive=True) + glob.glob("csrc/**/*.cu", recursive=True)
    setup(
        # The folder meta is the package trellis_ops.meta.
        packages=[
            *find_packages(include=["trellis_ops", "trellis_ops.*"]),
            "trellis_ops.meta",
            *(f"trellis_ops.meta.{name}" for name in find_packages("meta")),
        ],
        package_dir={"trellis_ops.meta": "meta"},
        package_data={"trellis_ops": ["py.typed"]},
        ext_modules=[Extension("trellis_ops._C", sources=sorted(sources))],
        cmdclass={
            "bdist_wheel": PlatformWheel,
            "build_ext": BuildLibrary,
            "dist_info": CheckedDistInfo,
        },
    )


if __name__ == "__main__":
    main()
