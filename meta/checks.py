"""Argument checks, shared word for word by the Python entries, the fakes and (in C++) the kernels.

Each function raises TypeError for a wrong type or dtype and ValueError for a wrong shape, device or
value; the message names op, argument, what came and what was expected. Nothing here looks at the
number of rows m, so a traced model stays free of guards on it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

FLOATS = (torch.float16, torch.bfloat16, torch.float32)

ACTS = ("exact", "int8")
"""Accuracies of activations, in the order of the ids that op schemas use."""

_SQG = {3: (32, 48, 64, 80, 96), 4: (80, 96)}
_NAMES = ("3inst", "mcg", "mul1", "sqg_e4m3", "sqg_fp16")
_MUL1 = 2


def is_tensor(op: str, name: str, tensor: object) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{op}: {name} is {type(tensor).__name__}, expected a Tensor")


def frozen(op: str, **tensors: torch.Tensor | None) -> None:
    """Gradient flows to activations alone; asking for another would silently get none."""
    if not torch.is_grad_enabled():
        return
    for name, tensor in tensors.items():
        if tensor is not None and tensor.requires_grad:
            raise ValueError(f"{op}: {name} requires grad, expected a frozen tensor")


def _dtype(op: str, name: str, tensor: torch.Tensor, wanted: tuple[torch.dtype, ...]) -> None:
    is_tensor(op, name, tensor)
    if tensor.dtype not in wanted:
        names = " or ".join(str(w).removeprefix("torch.") for w in wanted)
        got = str(tensor.dtype).removeprefix("torch.")
        raise TypeError(f"{op}: {name} has dtype {got}, expected {names}")


def _device(op: str, name: str, tensor: torch.Tensor, base: str, device: torch.device) -> None:
    if tensor.device != device:
        raise ValueError(
            f"{op}: {name} is on {tensor.device}, expected {device} (the device of {base})"
        )


def out_dtype(op: str, name: str, dtype: torch.dtype) -> None:
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{op}: {name} is {type(dtype).__name__}, expected a torch.dtype")
    if dtype not in FLOATS:
        got = str(dtype).removeprefix("torch.")
        raise TypeError(f"{op}: {name} is {got}, expected float16 or bfloat16 or float32")


def tile_words(op: str, name: str, words: int, codebook: int | None = None) -> None:
    """A packed tile's size, and that the codebook is defined at that rate."""
    half = words in (24, 40, 56)
    if not half and (words % 16 != 0 or not 16 <= words <= 128):
        raise ValueError(
            f"{op}: {name} has {words} words per tile, expected 16 * bits with bits from 1 to 8, "
            "or 24, 40 or 56"
        )
    if codebook is None:
        return
    if not 0 <= codebook < len(_NAMES):
        raise ValueError(f"{op}: codebook is {codebook}, expected 0 to {len(_NAMES) - 1}")
    if half and codebook != _MUL1:
        raise ValueError(
            f"{op}: codebook {_NAMES[codebook]} at {words / 16} bits, expected mul1: "
            "half rates exist for mul1 only"
        )
    if codebook in _SQG and words not in _SQG[codebook]:
        wanted = ", ".join(str(w // 16) for w in _SQG[codebook])
        raise ValueError(
            f"{op}: codebook {_NAMES[codebook]} at {words // 16} bits, expected bits in {wanted}"
        )


def trellis(op: str, tensor: torch.Tensor, codebook: int | None = None) -> None:
    _dtype(op, "trellis", tensor, (torch.int16,))
    if tensor.dim() != 3:
        raise ValueError(
            f"{op}: trellis has {tensor.dim()} dimensions, expected 3: [in/16, out/16, 16*bits]"
        )
    tile_words(op, "trellis", tensor.shape[2], codebook)


def scales(
    op: str,
    trellis: torch.Tensor,
    suh: torch.Tensor | None,
    svh: torch.Tensor | None,
) -> None:
    """suh and svh: float16 vectors of the padded features, which are then whole 128-blocks."""
    for name, vector, axis, side in (("suh", suh, 0, "in"), ("svh", svh, 1, "out")):
        if vector is None:
            continue
        _dtype(op, name, vector, (torch.float16,))
        features = trellis.shape[axis] * 16
        if vector.dim() != 1 or vector.shape[0] != features:
            raise ValueError(
                f"{op}: {name} has shape {list(vector.shape)}, expected [{features}] "
                f"({side}_features of the trellis)"
            )
        if features % 128 != 0:
            raise ValueError(
                f"{op}: trellis has {features} {side}_features, expected a multiple of 128 "
                f"where {name} is given"
            )
        _device(op, name, vector, "trellis", trellis.device)


def gemm(
    op: str,
    x: torch.Tensor,
    weights: torch.Tensor,
    suh: torch.Tensor | None,
    svh: torch.Tensor | None,
    added: torch.Tensor | None,
    codebook: int,
    out_features: int,
    dtype: torch.dtype,
) -> None:
    trellis(op, weights, codebook)
    scales(op, weights, suh, svh)
    activations(op, "x", x, weights, 0)
    features(op, "out_features", out_features, weights.shape[1] * 16)
    if added is not None:
        bias(op, added, out_features, weights.shape[1] * 16, "x", x.device)
    out_dtype(op, "out_dtype", dtype)


def act_id(op: str, name: str) -> int:
    if name not in ACTS:
        raise ValueError(f"{op}: act is {name!r}, expected one of {ACTS}")
    return ACTS.index(name)


def act(op: str, choice: int, codebook: int, device: torch.device) -> None:
    """Rounded activations, which only mul1 has, and only on a CPU."""
    if not 0 <= choice < len(ACTS):
        raise ValueError(f"{op}: act is {choice}, expected 0 to {len(ACTS) - 1}")
    if choice == 0:
        return
    if codebook != _MUL1:
        raise ValueError(
            f"{op}: act {ACTS[choice]} with codebook {_NAMES[codebook]}, expected mul1"
        )
    if device.type not in ("cpu", "meta"):
        raise ValueError(f"{op}: act {ACTS[choice]} with x on {device}, expected cpu")


def gemm_act(op: str, x: torch.Tensor, *rest) -> None:
    """What gemm takes, and the accuracy last."""
    *of_gemm, choice = rest
    gemm(op, x, *of_gemm)
    act(op, choice, of_gemm[4], x.device)


def input_grad(
    op: str,
    grad: torch.Tensor,
    weights: torch.Tensor,
    suh: torch.Tensor | None,
    svh: torch.Tensor | None,
    codebook: int,
    in_features: int,
    dtype: torch.dtype,
) -> None:
    trellis(op, weights, codebook)
    scales(op, weights, suh, svh)
    activations(op, "grad", grad, weights, 1)
    features(op, "in_features", in_features, weights.shape[0] * 16)
    out_dtype(op, "out_dtype", dtype)


def dequantize(
    op: str,
    weights: torch.Tensor,
    suh: torch.Tensor | None,
    svh: torch.Tensor | None,
    codebook: int,
    dtype: torch.dtype,
) -> None:
    trellis(op, weights, codebook)
    scales(op, weights, suh, svh)
    out_dtype(op, "dtype", dtype)


def bias(
    op: str, vector: torch.Tensor, logical: int, full: int, base: str, device: torch.device
) -> None:
    """A bias of the logical or the padded out_features."""
    _dtype(op, "bias", vector, FLOATS)
    if vector.dim() != 1 or (vector.shape[0] != logical and vector.shape[0] != full):
        raise ValueError(
            f"{op}: bias has shape {list(vector.shape)}, expected [{logical}]"
            + (f" or [{full}]" if full != logical else "")
        )
    _device(op, "bias", vector, base, device)


def activations(op: str, name: str, x: torch.Tensor, weights: torch.Tensor, axis: int) -> None:
    """Rows that meet the trellis on axis 0 (inputs) or 1 (output gradients)."""
    _dtype(op, name, x, FLOATS)
    if x.dim() < 1:
        raise ValueError(f"{op}: {name} has 0 dimensions, expected at least 1")
    _device(op, "trellis", weights, name, x.device)
    full = weights.shape[axis] * 16
    columns = x.shape[-1]
    if columns > full or columns <= full - 128:
        side = ("in_features", "out_features")[axis]
        raise ValueError(
            f"{op}: {name} has {columns} columns, expected {max(full - 127, 1)} to {full} "
            f"({side} of the trellis is {full})"
        )


def features(op: str, name: str, got: int, full: int) -> None:
    if not isinstance(got, (int, torch.SymInt)):
        raise TypeError(f"{op}: {name} is {type(got).__name__}, expected an int")
    if got > full or got <= full - 128 or got < 1:
        raise ValueError(f"{op}: {name} is {got}, expected {max(full - 127, 1)} to {full}")


def hadamard(op: str, x: torch.Tensor) -> None:
    _dtype(op, "x", x, FLOATS)
    if x.dim() < 1 or x.shape[-1] % 128 != 0:
        raise ValueError(
            f"{op}: x has shape {list(x.shape)}, "
            "expected a last dimension that is a multiple of 128"
        )


def states(op: str, tensor: torch.Tensor, words: int) -> None:
    _dtype(op, "states", tensor, (torch.int32, torch.int64))
    if tensor.dim() < 1 or tensor.shape[-1] != 256:
        raise ValueError(f"{op}: states has shape {list(tensor.shape)}, expected [..., 256]")
    tile_words(op, "states", words)


def tiles(op: str, tensor: torch.Tensor, words: int, codebook: int) -> None:
    _dtype(op, "tiles", tensor, (torch.float32,))
    if tensor.dim() != 2 or tensor.shape[1] != 256:
        raise ValueError(f"{op}: tiles has shape {list(tensor.shape)}, expected [T, 256]")
    tile_words(op, "tiles", words, codebook)


# The whole check of each op, taking its arguments: for the fakes, and for implementations in
# PyTorch that torch.ops.trellis_ops may reach without passing the Python entry.
OPS: dict[str, Callable[..., None]] = {
    "trellis_gemm": partial(gemm, "trellis_gemm"),
    "trellis_gemm_inference": partial(gemm, "trellis_gemm"),
    "trellis_gemm_act": partial(gemm_act, "trellis_gemm"),
    "parity_gemm": partial(gemm, "parity_gemm"),
    "gemm_input_grad": partial(input_grad, "gemm_input_grad"),
    "dequantize": partial(dequantize, "dequantize"),
    "hadamard_128": partial(hadamard, "hadamard_128"),
    "unpack_trellis": partial(trellis, "unpack_trellis"),
    "pack_trellis": partial(states, "pack_trellis"),
    "quantize_tiles": partial(tiles, "quantize_tiles"),
}


def sign_words(name: str, words: torch.Tensor) -> None:
    """Legacy packed signs."""
    if words.dtype != torch.int16 or words.dim() != 1:
        raise ValueError(f"{name}: {words.dtype} {list(words.shape)}, expected int16 [features/16]")
