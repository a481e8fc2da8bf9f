"""python -m trellis_ops dequantize: an EXL3 checkpoint as an ordinary one."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from ..staging import staged
from .convert import copy_others

_REPLACED = ("config.json", "quantization_config.json", "generation_config.json")


def add_parser(commands) -> argparse.ArgumentParser:
    text = "write an ordinary checkpoint with the weights that the quantised ones stand for"
    description = f"{text.capitalize()}. Takes as much memory as that checkpoint is large."
    parser = commands.add_parser("dequantize", help=text, description=description)
    parser.add_argument("path", metavar="DIR", type=Path, help="a checkpoint's folder")
    parser.add_argument("output", metavar="OUT", type=Path, help="the folder to write")
    parser.add_argument(
        "--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16",
        help="of all weights (default: bfloat16)",
    )  # fmt: skip
    return parser


def run(options: argparse.Namespace) -> int:
    try:
        import transformers  # noqa: F401
    except ImportError:
        raise ValueError("needs transformers, which the extra [hf] installs") from None
    from ..integrations import load_model

    if not (options.path / "config.json").is_file():
        raise ValueError(f"{options.path}: has no config.json, expected a checkpoint's folder")
    model = load_model(options.path, dtype=getattr(torch, options.dtype)).dequantize()
    with staged(options.output, "dequantize") as folder:
        model.save_pretrained(folder)
        copy_others(options.path, folder, _REPLACED)
    print(f"{model.num_parameters():,} parameters in {options.dtype} written to {options.output}")
    return 0
