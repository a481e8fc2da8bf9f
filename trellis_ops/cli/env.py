"""python -m trellis_ops env: what is installed, and whether the library is loaded."""

from __future__ import annotations

import argparse
import os
import platform
from importlib import metadata, util
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from .. import __version__, _binary

ISAS = ("generic", "avx2", "avx512", "avx512_vnni", "avx512_fp16", "amx", "neon")
"""In the order of the bits that torch.ops.trellis_ops._cpu_isas() sets."""


def gemm_kernel(rows: int, act: str = "exact") -> str:
    """The kernel that trellis_gemm runs on this processor for that many rows."""
    name = ISAS[torch.ops.trellis_ops._cpu_gemm_isa(rows)]
    # As slab_kernels in csrc/cpu/isa.cpp decides.
    rounded = act == "int8" and rows <= 2 and name in ("avx512_vnni", "avx512_fp16")
    return f"{name} {act}" if rounded else name


def add_parser(commands) -> argparse.ArgumentParser:
    text = "show versions, the compiled library, the processor and the GPUs"
    return commands.add_parser("env", help=text, description=text.capitalize() + ".")


def run(options: argparse.Namespace) -> int:
    table = Table("what", "value", show_header=False)
    for name, value in facts():
        table.add_row(name, value)
    Console(soft_wrap=False).print(table)
    return 0


def facts() -> list[tuple[str, str]]:
    """What a report of a fault should hold, as (name, value)."""
    rows = [
        ("trellis_ops", __version__),
        ("Python", f"{platform.python_version()} on {platform.platform()}"),
        ("torch", torch.__version__),
        ("CUDA of torch", torch.version.cuda or "none"),
    ]
    rows += [(name, _version(name)) for name in ("safetensors", "transformers", "accelerate")]
    loaded = "loaded" if _binary.available() else f"NOT loaded: {_binary.reason()}"
    rows += [
        ("library", str(_binary.path())),
        ("", loaded),
        ("processor", _processor()),
        ("kernels for", _kernels()),
        ("threads", f"{torch.get_num_threads()} of {os.cpu_count()} processors"),
    ]
    return rows + _gpus()


def _version(package: str) -> str:
    return metadata.version(package) if util.find_spec(package) else "not installed"


def _processor() -> str:
    """The processor's name; Linux keeps it in a file, and not every architecture's has one."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else 'unknown'} ({platform.machine()})"


def _kernels() -> str:
    if not _binary.available():
        return "none, the library is not loaded"
    bits = torch.ops.trellis_ops._cpu_isas()
    return ", ".join(name for i, name in enumerate(ISAS) if bits >> i & 1)


def _gpus() -> list[tuple[str, str]]:
    if not torch.cuda.is_available():
        return [("GPUs", "none that torch can use")]
    rows = []
    for i in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(i)
        memory = f"{gpu.total_memory / 2**30:.0f} GiB"
        rows.append((f"cuda:{i}", f"{gpu.name}, capability {gpu.major}.{gpu.minor}, {memory}"))
    return rows
