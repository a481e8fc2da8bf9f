"""python -m trellis_ops bench linear: this library and a dense BF16 layer in the same run.
(bench moe is in bench_moe.py.)

A row is one matrix and one number of rows m: the whole quantised layer (both transforms, product,
scales) against the dense product alone. Weights rotate through more copies than the cache holds, so
that every call reads them from memory.

On a GPU the calls are replayed from one CUDA graph, and times are medians. On a CPU the peers are
also a dense FP32 layer and, where the package glq is installed, its 3INST product (no transforms);
all take turns call by call, so that a clock that moves moves all, and times are best quartiles: of
the thread's own time where there is one thread, which other programs do not lengthen.
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
from importlib import util
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
    threads: int | None = None  # of a CPU
    float32_us: float | None = None
    glq_us: float | None = None
    act: str = "exact"

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
    parser.add_argument(
        "--act", default="exact", help="linear: exact, int8 (mul1 on a CPU), comma-separated"
    )
    parser.add_argument("--threads", type=int, help="of a CPU; default: torch's own number")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every number there")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="linear: draw the ratios there")
    return parser


def run(options: argparse.Namespace) -> int:
    moe = options.what == "moe"
    options.m = options.m or (MOE_ROWS if moe else ROWS)
    options.bits = options.bits or ("3,4,mixed" if moe else "4")
    if options.threads is not None:
        if options.device == "cuda" or options.threads < 1:
            raise ValueError(f"--threads {options.threads}: expected a positive number, for a CPU")
        torch.set_num_threads(options.threads)
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
    acts = options.act.split(",")
    if not set(acts) <= {"exact"} | ({"int8"} if options.device == "cpu" else set()):
        raise ValueError(f"--act {options.act}: expected exact, or int8 on a CPU, comma-separated")
    cases = [
        (c, b, act)
        for c in codebooks
        for b in rates
        for act in acts
        if b in rates_of(c) and (act == "exact" or c == "mul1")
    ]
    for in_features, out_features in shapes:
        for m in rows_of_x:
            results += bench.rows(in_features, out_features, m, cases)
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
    size = x.shape[1] * out_features * x.element_size()
    weights = [
        torch.randn(out_features, x.shape[1], dtype=x.dtype, device=x.device)
        for _ in range(bench.copies(size))
    ]
    return [lambda w=w: torch.nn.functional.linear(x, w) for w in weights]


def _trellis_calls(
    bench, x: torch.Tensor, out_features: int, codebook: str, bits: float, act: str
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
    options = {"codebook": codebook, "act": act}
    return [lambda part=part: ops.trellis_gemm(x, *part, **options) for part in layers]


def _glq_calls(bench, x: torch.Tensor, out_features: int, bits: float):
    """GLQ's product of 3INST weights, or None: it takes up to eight rows at three rates."""
    if util.find_spec("glq") is None or bits not in (2, 3, 4) or x.shape[0] > 8:
        return None
    from glq import inference_kernel_cpu

    product = inference_kernel_cpu.require_cpu_ext().glq_decode_matmul_trellis_3inst_cpu
    in_features = x.shape[1]
    shape = (in_features // 16 * (out_features // 16), int(16 * bits))
    layers = [
        torch.randint(-32768, 32768, shape, dtype=torch.int16)
        for _ in range(bench.copies(in_features * out_features * bits / 8))
    ]
    return [lambda part=part: product(x, part, out_features, in_features) for part in layers]


class _Cuda:
    """Medians of graph replays, each over every copy of the weights."""

    device = "cuda"
    unit = 160 << 20  # more than any second-level cache in use

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            raise ValueError("--device cuda: torch sees no GPU")

    def copies(self, size: float) -> int:
        return max(3, int(self.unit / size) + 1)

    def rows(self, in_features: int, out_features: int, m: int, cases) -> list[Row]:
        x = torch.randn(m, in_features, dtype=torch.bfloat16, device=self.device)
        dense_us = self.time(_dense_calls(self, x, out_features))
        rows = []
        for case in cases:
            codebook, bits, _ = case
            calls = _trellis_calls(self, x, out_features, *case)
            us = self.time(calls)
            shape = (in_features, out_features, m, bits, codebook)
            rows.append(Row(*shape, us, dense_us, self.kernel(calls[0])))
        return rows

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
    """Best quartiles of calls that take turns."""

    device = "cpu"
    unit = 400 << 20

    def copies(self, size: float) -> int:
        return max(2, min(8, int(self.unit / size) + 1))

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

    def rows(self, in_features: int, out_features: int, m: int, cases) -> list[Row]:
        x = torch.randn(m, in_features)
        half = x.bfloat16()
        peers = {
            "bfloat16": _dense_calls(self, half, out_features),
            "float32": _dense_calls(self, x, out_features),
        }
        for bits in sorted({bits for _, bits, _ in cases}):
            calls = _glq_calls(self, x, out_features, bits)
            if calls:
                peers[f"glq {bits:g}"] = calls
        ours = {case: _trellis_calls(self, half, out_features, *case) for case in cases}
        us = self.times({**peers, **ours})
        return [
            Row(
                in_features,
                out_features,
                m,
                bits,
                codebook,
                us[codebook, bits, act],
                us["bfloat16"],
                gemm_kernel(m, act),
                torch.get_num_threads(),
                us["float32"],
                us.get(f"glq {bits:g}"),
                act,
            )
            for codebook, bits, act in cases
        ]

    def times(self, groups: dict) -> dict:
        clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
        times: dict = {name: [] for name in groups}
        spent, turn = 0.0, -1
        while turn < 12 or (spent < 2.0 and turn < 200):
            for name, calls in groups.items():
                start = clock()
                calls[turn % len(calls)]()
                if turn >= 0:  # the first turn of each warms up
                    times[name].append(clock() - start)
                    spent += times[name][-1]
            turn += 1
        return {name: sorted(seconds)[len(seconds) // 4] * 1e6 for name, seconds in times.items()}

    def time(self, calls: list[Callable[[], torch.Tensor]]) -> float:
        return self.times({"alone": calls})["alone"]

    def kernel(self, call: Callable[[], torch.Tensor]) -> str:
        """Name of the one for a row; more rows of an expert may have another."""
        return gemm_kernel(1)

    def read_bandwidth(self) -> float:
        data = torch.ones(1 << 26, dtype=torch.float32)
        return data.nbytes / self.time([data.sum]) * 1e6


def _table(results: list[Row], bench, bandwidth: float) -> Table:
    machine = ", ".join(f"{key} {value}" for key, value in bench.machine().items())
    table = Table(title=f"trellis_gemm against BF16, {machine}, torch {torch.__version__}")
    on_cpu = any(row.threads for row in results)
    for name in ("in x out", "m", "bits", "codebook"):
        table.add_column(name)
    numbers = ["us", "BF16 us", "times faster"]
    numbers += ["than FP32", "than GLQ", "weights/s, core"] if on_cpu else ["weights/s"]
    for name in (*numbers, "of read bandwidth"):
        table.add_column(name, justify="right")
    table.add_column("kernel")
    for row in results:
        cells = [f"{row.us:.1f}", f"{row.dense_us:.1f}", f"{row.ratio:.2f}"]
        if on_cpu:
            cells += [
                "-" if us is None else f"{us / row.us:.2f}" for us in (row.float32_us, row.glq_us)
            ]
        table.add_row(
            f"{row.in_features}x{row.out_features}",
            str(row.m),
            f"{row.bits:g}",
            row.codebook if row.act == "exact" else f"{row.codebook} {row.act}",
            *cells,
            f"{row.weights_per_second / (row.threads or 1):.2e}",
            f"{row.bytes_per_second / bandwidth:.0%}",
            row.kernel,
        )
    return table


def _arguments(options: argparse.Namespace) -> str:
    """What decides the numbers, as one would type it."""
    which = "models" if options.what == "moe" else "shapes"
    names = ["device", which, "m", "bits", "codebook", "threads"]
    if options.act != "exact":
        names.insert(-1, "act")
    given = [name for name in names if getattr(options, name) is not None]
    return " ".join([options.what, *(f"--{name} {getattr(options, name)}" for name in given)])


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
        name = f"{row.in_features}x{row.out_features} {row.bits:g} bits {row.codebook} {row.act}"
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
