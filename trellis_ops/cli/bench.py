"""python -m trellis_ops bench linear: this library and a dense BF16 layer in the same run.
(bench moe is in bench_moe.py.)

A row is one matrix and one number of rows m: the whole quantised layer (both transforms, product,
scales) against the dense product alone. Weights rotate through more copies than the cache holds, so
that every call reads them from memory; on a GPU the calls are replayed from one CUDA graph. Times
are medians.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from .. import __version__, ops
from ..formats.codebooks import CODEBOOKS, rates_of
from ..formats.tiles import tile_words_of
from .env import gemm_kernel

SHAPES = "4096x4096,4096x14336,14336x4096,8192x8192,8192x28672,5120x25600,6144x2048,2048x6144"
ROWS = "1,4,8,16,32,64,128"
MODELS = "qwen3-30b-a3b,glm-like"
MOE_ROWS = "1,4,16,32,128,1024,4096"


@dataclass
class Row:
    """One measurement; times in microseconds."""

    in_features: int
    out_features: int
    m: int
    bits: float
    codebook: str
    us: float
    dense_us: float
    kernel: str

    @property
    def ratio(self) -> float:
        """How many times faster than the dense layer."""
        return self.dense_us / self.us

    @property
    def weights_per_second(self) -> float:
        return self.in_features * self.out_features / self.us * 1e6

    @property
    def bytes_per_second(self) -> float:
        """Of packed weights."""
        return self.weights_per_second * self.bits / 8


def add_parser(commands) -> argparse.ArgumentParser:
    text = "time the ops against dense layers in the same run"
    parser = commands.add_parser("bench", help=text, description=text.capitalize() + ".")
    parser.add_argument(
        "what",
        choices=["linear", "moe"],
        help="linear: trellis_gemm against BF16; moe: routed experts against BF16 grouped GEMM",
    )
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=["cuda", "cpu"], default=default)
    parser.add_argument("--shapes", default=SHAPES, help="linear: INxOUT, comma-separated")
    parser.add_argument("--models", default=MODELS, help="moe: names, comma-separated")
    parser.add_argument("--m", help="numbers of rows, comma-separated")
    parser.add_argument(
        "--bits", help="rates, comma-separated; moe: also mixed, a third each of 3, 4 and 5"
    )
    parser.add_argument("--codebook", default="mcg,mul1", help="comma-separated")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every number there")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="linear: draw the ratios there")
    return parser


def run(options: argparse.Namespace) -> int:
    moe = options.what == "moe"
    options.m = options.m or (MOE_ROWS if moe else ROWS)
    options.bits = options.bits or ("3,4,mixed" if moe else "4")
    if moe:
        from . import bench_moe  # which imports this module

        return bench_moe.run(options)
    shapes = [_shape(text) for text in options.shapes.split(",")]
    rows_of_x = [int(text) for text in options.m.split(",")]
    codebooks = codebooks_of(options)
    rates = [float(text) for text in options.bits.split(",")]
    bench = machine_of(options)
    bandwidth = bench.read_bandwidth()
    console = wide_console()
    results = []
    for in_features, out_features in shapes:
        for m in rows_of_x:
            x = torch.randn(m, in_features, dtype=torch.bfloat16, device=bench.device)
            dense_us = bench.time(_dense_calls(bench, x, out_features))
            for codebook in codebooks:
                for bits in (rate for rate in rates if rate in rates_of(codebook)):
                    calls = _trellis_calls(bench, x, out_features, bits, codebook)
                    row = Row(
                        in_features,
                        out_features,
                        m,
                        bits,
                        codebook,
                        bench.time(calls),
                        dense_us,
                        bench.kernel(calls[0]),
                    )
                    results.append(row)
                    if sys.stderr.isatty():
                        print(f"\r{in_features}x{out_features} m={m} ", end="", file=sys.stderr)
    console.print(_table(results, bench, bandwidth))
    if options.json:
        write(options, results, bench, bandwidth)
    if options.plot:
        _plot(options.plot, results, bench)
    return 0


def codebooks_of(options: argparse.Namespace) -> list[str]:
    names = options.codebook.split(",")
    for name in names:
        if name not in CODEBOOKS:
            raise ValueError(f"--codebook {name}: expected some of {', '.join(CODEBOOKS)}")
    return names


def machine_of(options: argparse.Namespace):
    """What measures on the device that was asked for."""
    return _Cuda() if options.device == "cuda" else _Cpu()


def wide_console() -> Console:
    console = Console()
    return console if console.is_terminal else Console(width=120)


def _shape(text: str) -> tuple[int, int]:
    parts = text.split("x")
    if len(parts) != 2 or not all(part.isdigit() and int(part) % 128 == 0 for part in parts):
        raise ValueError(f"--shapes {text}: expected INxOUT, both multiples of 128")
    return int(parts[0]), int(parts[1])


def _dense_calls(bench, x: torch.Tensor, out_features: int) -> list[Callable[[], torch.Tensor]]:
    size = x.shape[1] * out_features * 2
    weights = [
        torch.randn(out_features, x.shape[1], dtype=torch.bfloat16, device=x.device)
        for _ in range(bench.copies(size))
    ]
    return [lambda w=w: torch.nn.functional.linear(x, w) for w in weights]


def _trellis_calls(
    bench, x: torch.Tensor, out_features: int, bits: float, codebook: str
) -> list[Callable[[], torch.Tensor]]:
    in_features = x.shape[1]
    shape = (in_features // 16, out_features // 16, tile_words_of(bits))
    size = in_features * out_features * bits / 8
    layers = [
        (
            torch.randint(-32768, 32768, shape, device=x.device, dtype=torch.int16),
            torch.randn(in_features, device=x.device).half(),
            torch.randn(out_features, device=x.device).half() / in_features**0.5,
        )
        for _ in range(bench.copies(size))
    ]
    return [lambda part=part: ops.trellis_gemm(x, *part, codebook=codebook) for part in layers]


class _Cuda:
    """Medians of graph replays, each over every copy of the weights."""

    device = "cuda"
    unit = 160 << 20  # more than any second-level cache in use

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            raise ValueError("--device cuda: torch sees no GPU")

    def copies(self, size: float) -> int:
        return max(3, int(self.unit / size) + 1)

    def machine(self) -> dict[str, str]:
        properties = torch.cuda.get_device_properties(0)
        smi = _output(
            [
                "nvidia-smi",
                "--query-gpu=driver_version,clocks.sm,clocks.mem",
                "--format=csv,noheader",
            ]
        )
        return {
            "GPU": properties.name,
            "SMs": str(properties.multi_processor_count),
            "driver, clocks": smi,
        }

    def time(self, calls: list[Callable[[], torch.Tensor]], repeats: int = 9) -> float:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for call in calls:
                call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in calls:
                call()
        for _ in range(3):
            graph.replay()
        times = []
        for _ in range(repeats):
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            stop.record()
            stop.synchronize()
            times.append(start.elapsed_time(stop) * 1e3 / len(calls))
        return statistics.median(times)

    def kernel(self, call: Callable[[], torch.Tensor]) -> str:
        """Name of the longest kernel that ran."""
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            call()
            torch.cuda.synchronize()
        events = [e for e in profile.key_averages() if e.device_time_total > 0]
        longest = max(events, key=lambda e: e.device_time_total)
        name = re.sub(r"\(trellis::cuda::\w+\)(?=\d)", "", longest.key)  # an enum's type
        return name.removeprefix("void ").removeprefix("trellis::cuda::").split("(")[0]

    def read_bandwidth(self) -> float:
        """Bytes a second of a reduction that only reads."""
        data = torch.ones(1 << 30, dtype=torch.float16, device="cuda").view(torch.int32)
        us = self.time([lambda: data.sum(dtype=torch.int32)], repeats=5)
        return data.nbytes / us * 1e6


class _Cpu:
    device = "cpu"
    unit = 400 << 20

    def copies(self, size: float) -> int:
        return max(2, min(16, int(self.unit / size) + 1))

    def machine(self) -> dict[str, str]:
        name = next(
            (
                line.split(":")[1].strip()
                for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
                if line.startswith("model name")
            ),
            platform.processor(),
        )
        return {"CPU": name, "threads": str(torch.get_num_threads())}

    def time(self, calls: list[Callable[[], torch.Tensor]], repeats: int = 5) -> float:
        for call in calls[:2]:
            call()
        times = []
        for i in range(max(repeats, len(calls))):
            start = time.perf_counter()
            calls[i % len(calls)]()
            times.append((time.perf_counter() - start) * 1e6)
        return statistics.median(times)

    def kernel(self, call: Callable[[], torch.Tensor]) -> str:
        return gemm_kernel()

    def read_bandwidth(self) -> float:
        data = torch.ones(1 << 26, dtype=torch.float32)
        us = self.time([data.sum], repeats=5)
        return data.nbytes / us * 1e6


def _table(results: list[Row], bench, bandwidth: float) -> Table:
    machine = ", ".join(f"{key} {value}" for key, value in bench.machine().items())
    table = Table(title=f"trellis_gemm against BF16, {machine}, torch {torch.__version__}")
    for name in ("in x out", "m", "bits", "codebook"):
        table.add_column(name)
    for name in ("us", "BF16 us", "times faster", "weights/s", "of read bandwidth"):
        table.add_column(name, justify="right")
    table.add_column("kernel")
    for row in results:
        table.add_row(
            f"{row.in_features}x{row.out_features}",
            str(row.m),
            f"{row.bits:g}",
            row.codebook,
            f"{row.us:.1f}",
            f"{row.dense_us:.1f}",
            f"{row.ratio:.2f}",
            f"{row.weights_per_second:.2e}",
            f"{row.bytes_per_second / bandwidth:.0%}",
            row.kernel,
        )
    return table


def _arguments(options: argparse.Namespace) -> str:
    """What decides the numbers, as one would type it."""
    which = "models" if options.what == "moe" else "shapes"
    names = ("device", which, "m", "bits", "codebook")
    return " ".join([options.what, *(f"--{name} {getattr(options, name)}" for name in names)])


def write(options: argparse.Namespace, results: list, bench, bandwidth: float) -> None:
    """JSON of rows that have a ratio and weights_per_second, whole or not at all."""
    path = options.json
    content = {
        "command": "python -m trellis_ops bench " + _arguments(options),
        "trellis_ops": __version__,
        "torch": torch.__version__,
        "machine": bench.machine(),
        "read_bytes_per_second": bandwidth,
        "rows": [
            {
                **asdict(row),
                "ratio": row.ratio,
                "weights_per_second": row.weights_per_second,
            }
            for row in results
        ],
    }
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    os.replace(temporary, path)


def _plot(path: Path, results: list[Row], bench) -> None:
    try:
        from matplotlib import pyplot
    except ImportError:
        raise ValueError("--plot needs matplotlib: pip install matplotlib") from None
    figure, axes = pyplot.subplots(figsize=(9, 5))
    series: dict[str, list[Row]] = {}
    for row in results:
        name = f"{row.in_features}x{row.out_features} {row.bits:g} bits {row.codebook}"
        series.setdefault(name, []).append(row)
    for name, rows in series.items():
        axes.plot([row.m for row in rows], [row.ratio for row in rows], marker="o", label=name)
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.set_xlabel("rows m")
    axes.set_ylabel("times faster than BF16")
    axes.legend(fontsize="x-small")
    figure.savefig(path, bbox_inches="tight")


def _output(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "not known"
    return done.stdout.strip()
