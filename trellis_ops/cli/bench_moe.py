"""python -m trellis_ops bench moe: routed experts and a dense BF16 grouped GEMM in the same run.

A row is one model's layer and one number of tokens m, router excluded. Both sides get the same
hidden states and routes, drawn at random, and do all that is between them and the weighted sum;
layers rotate, so that every call reads its weights from memory. Times are medians.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
from rich.table import Table
from torch.nn import functional

from ..formats.codebooks import rates_of
from ..formats.moe import MoeLayout
from ..nn import Exl3MoE
from ..workspace import Workspace
from .bench import codebooks_of, machine_of, wide_console, write


@dataclass(frozen=True)
class Model:
    """The routed experts of one layer."""

    name: str
    experts: int
    top_k: int
    hidden: int
    intermediate: int

    @property
    def weights(self) -> int:
        """Of one expert."""
        return 3 * self.hidden * self.intermediate


MODELS = {
    model.name: model
    for model in (
        Model("qwen3-30b-a3b", 128, 8, 2048, 768),
        Model("glm-like", 256, 8, 6144, 2048),
        Model("small", 16, 4, 512, 256),
    )
}


@dataclass
class Row:
    """One measurement; times in microseconds."""

    model: str
    m: int
    bits: str
    average_bits: float
    codebook: str
    touched_weights: int
    us: float
    dense_us: float
    kernel: str

    @property
    def ratio(self) -> float:
        """How many times faster than the dense experts."""
        return self.dense_us / self.us

    @property
    def weights_per_second(self) -> float:
        """Of the experts that are hit."""
        return self.touched_weights / self.us * 1e6


def run(options: argparse.Namespace) -> int:
    if options.plot:
        raise ValueError("--plot: bench moe draws no plot")
    if options.act != "exact":
        raise ValueError(f"--act {options.act}: experts have exact activations only")
    models = [_model(name) for name in options.models.split(",")]
    rates = options.bits.split(",")
    codebooks = codebooks_of(options)
    bench = machine_of(options)
    bandwidth = bench.read_bandwidth()
    results: list[Row] = []
    with torch.no_grad():
        for model in models:
            for m in (int(text) for text in options.m.split(",")):
                results += _rows(bench, model, m, rates, codebooks)
    wide_console().print(_table(results, bench, bandwidth))
    if options.json:
        write(options, results, bench, bandwidth)
    return 0


def _model(name: str) -> Model:
    if name not in MODELS:
        raise ValueError(f"--models {name}: expected some of {', '.join(MODELS)}")
    return MODELS[name]


def _rows(bench, model: Model, m: int, rates: list[str], codebooks: list[str]) -> list[Row]:
    hit = model.experts * (1 - (1 - model.top_k / model.experts) ** m)
    x = torch.randn(m, model.hidden, dtype=torch.bfloat16, device=bench.device)
    routes = _routes(bench, model, m, bench.copies(hit * model.weights * 2))
    dense_us = bench.time(_dense_calls(bench, model, x, routes))
    rows = []
    for codebook in codebooks:
        for text in rates:
            bits = _bits(model, text)
            if not all(rate in rates_of(codebook) for one in bits for rate in one):
                continue
            average = sum(map(sum, bits)) / 3 / model.experts
            size = hit * model.weights * average / 8
            routes = _routes(bench, model, m, bench.copies(size))
            calls = _trellis_calls(bench, model, x, routes, bits, codebook)
            touched = sum(ids.unique().numel() for ids, _ in routes) * model.weights
            rows.append(
                Row(
                    model.name,
                    m,
                    text,
                    average,
                    codebook,
                    touched // len(routes),
                    bench.time(calls),
                    dense_us,
                    bench.kernel(calls[0]),
                )
            )
            if sys.stderr.isatty():
                print(f"\r{model.name} m={m} {codebook} {text} ", end="", file=sys.stderr)
    return rows


Routes = list[tuple[torch.Tensor, torch.Tensor]]


def _routes(bench, model: Model, m: int, calls: int) -> Routes:
    """Ids and weights of each call: experts at random, none twice for a token."""
    generator = torch.Generator().manual_seed(m)
    routes = []
    for _ in range(calls):
        scores = torch.rand(m, model.experts, generator=generator)
        weights, ids = scores.topk(model.top_k)
        routes.append((ids.to(bench.device), weights.to(bench.device)))
    return routes


def _bits(model: Model, text: str) -> list[list[float]]:
    """Rates by projection and expert."""
    if text != "mixed":
        return [[float(text)] * model.experts] * 3
    third = model.experts // 3
    rates = [3.0] * third + [5.0] * third + [4.0] * (model.experts - 2 * third)
    shuffled = random.Random(0)
    return [shuffled.sample(rates, len(rates)) for _ in range(3)]


def _trellis_calls(
    bench, model: Model, x: torch.Tensor, routes: Routes, bits: list[list[float]], codebook: str
) -> list[Callable[[], torch.Tensor]]:
    layers = []
    workspace = None
    for _ in routes:
        layout = MoeLayout.empty(
            tuple(bits),
            experts=model.experts,
            hidden=model.hidden,
            intermediate=model.intermediate,
            codebook=codebook,
            device=bench.device,
        )
        layout.packed.copy_(torch.randint_like(layout.packed, -32768, 32767))
        for name, tensor in layout.tensors().items():
            if name.endswith(("suh", "svh")):
                tensor.normal_(std=1.0 if name.endswith("suh") else tensor.shape[1] ** -0.5)
        layer = Exl3MoE(layout)
        if workspace is None:
            workspace = _workspace(layer, x.shape[0], model.top_k)
        layer.workspace = workspace
        layers.append(layer)
    return [
        lambda layer=layer, route=route: layer(x, *route)
        for layer, route in zip(layers, routes, strict=True)
    ]


def _workspace(layer: Exl3MoE, m: int, top_k: int) -> Workspace:
    try:
        return Workspace(layer.plan(m, top_k))
    except RuntimeError as error:  # no kernel for the device
        raise ValueError(str(error)) from None


def _dense_calls(
    bench, model: Model, x: torch.Tensor, routes: Routes
) -> list[Callable[[], torch.Tensor]]:
    def random_weights(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.bfloat16, device=bench.device) * shape[1] ** -0.5

    layers = [
        (
            random_weights(model.experts, model.hidden, 2 * model.intermediate),
            random_weights(model.experts, model.intermediate, model.hidden),
        )
        for _ in routes
    ]
    return [
        lambda layer=layer, route=route: dense_experts(x, *route, *layer)
        for layer, route in zip(layers, routes, strict=True)
    ]


def dense_experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
) -> torch.Tensor:
    """Dense experts with silu, as models in BF16 run them: rows sorted by expert, grouped products.

    Args:
        x: [T, hidden]; ids, weights: [T, top_k].
        gate_up: [E, hidden, 2 * intermediate]; down: [E, intermediate, hidden].
    """
    flat = ids.flatten()
    order = flat.argsort()
    counts = (flat[:, None] == torch.arange(gate_up.shape[0], device=x.device)).sum(0)
    ends = counts.cumsum(0).to(torch.int32)
    gate, up = _grouped(x[order // ids.shape[1]], gate_up, ends).chunk(2, -1)
    rows = _grouped(functional.silu(gate) * up, down, ends)
    results = torch.empty_like(rows)
    results[order] = rows
    return (results.view(*ids.shape, -1) * weights[..., None].to(x.dtype)).sum(1)


def _grouped(x: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Rows up to ends[e] through weights[e]."""
    if hasattr(torch, "_grouped_mm"):
        return torch._grouped_mm(x, weights, offs=ends)
    y = x.new_empty(x.shape[0], weights.shape[2])
    start = 0
    for e, end in enumerate(ends.tolist()):
        if end > start:
            torch.mm(x[start:end], weights[e], out=y[start:end])
        start = end
    return y


def _table(results: list[Row], bench, bandwidth: float) -> Table:
    machine = ", ".join(f"{key} {value}" for key, value in bench.machine().items())
    table = Table(title=f"rank_sliced_moe against BF16, {machine}, torch {torch.__version__}")
    for name in ("model", "m", "bits", "codebook"):
        table.add_column(name)
    for name in ("us", "BF16 us", "times faster", "touched weights/s", "of read bandwidth"):
        table.add_column(name, justify="right")
    table.add_column("kernel")
    for row in results:
        read = row.weights_per_second * row.average_bits / 8
        table.add_row(
            row.model,
            str(row.m),
            row.bits,
            row.codebook,
            f"{row.us:.1f}",
            f"{row.dense_us:.1f}",
            f"{row.ratio:.2f}",
            f"{row.weights_per_second:.2e}",
            f"{read / bandwidth:.0%}",
            row.kernel,
        )
    return table
