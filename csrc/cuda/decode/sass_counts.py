"""Instructions per weight in the main loop of the GEMM kernels, read from their machine code.

    python csrc/cuda/decode/sass_counts.py build/ninja/csrc/cuda/gemm

Needs no GPU, only cuobjdump and nvdisasm (CUDA toolkit, or the PyPI packages nvidia-cuda-cuobjdump
and nvidia-cuda-nvdisasm). Prints the table of README.md beside it; --check FILE compares instead,
and fails where a kernel now needs more than it says there. Fails too where ptxas lets wgmma wait
for each product, which it only remarks on (C7510, C7512, C7513) and which halves a kernel's speed.
"""

from __future__ import annotations

import argparse
import functools
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

# Weights that a lane turns into operands in one turn of the loop: sixteen tiles in the small
# kernels, four in the wide ones.
SMALL_WEIGHTS, WIDE_WEIGHTS = 4 * 4 * 8, 4 * 8
OPERANDS = ("halves", "bytes", "packed", "packed")
CODEBOOKS = ("3inst", "mcg", "mul1")
# The integer pipe (shift, logic, compare, permute), and the one of multiply-add.
ALU = ("SHF", "LOP3", "PRMT", "LEA", "ISETP", "IADD3", "VIADD", "SEL", "PLOP3", "VIMNMX")
FMA = ("IMAD", "IDP", "FFMA", "FMUL", "FADD", "HFMA2", "HADD2")


Key = tuple[float, str, str, int]  # bits, codebook, operand, rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="where the object files of gemm/*.cu are")
    parser.add_argument("--check", type=Path, metavar="README", help="compare with this table")
    options = parser.parse_args()
    rows = {}
    for file in sorted(options.folder.glob("*_k*.o")):
        rows.update(counts(file))
    if not rows:
        sys.exit(f"sass_counts: no small_k*.o or wide_k*.o in {options.folder}")
    tiles = options.folder.parent.glob("moe/*_tiles_*.o")  # wide and tall ones
    wide = [*options.folder.glob("wide_k*.o"), *tiles]
    if waiting := [name for file in sorted(wide) for name in waits_for_each(file)]:
        sys.exit("sass_counts: wgmma waits for each product in\n" + "\n".join(waiting))
    lines = table(rows)
    if options.check is None:
        print("\n".join(lines))
        return 0
    text = options.check.read_text(encoding="utf-8")
    worse = [line for line in lines[2:] if more_than(line, text)]
    print("\n".join(worse) or "no kernel needs more instructions than the table says")
    return 1 if worse else 0


@functools.cache
def functions(file: Path) -> list[str]:
    """The machine code of each function, its name first."""
    command = ["cuobjdump", "--dump-sass", str(file)]
    text = subprocess.run(
        command, capture_output=True, text=True, check=True, env=os.environ
    ).stdout
    return text.split("Function : ")[1:]


def waits_for_each(file: Path) -> list[str]:
    """Functions whose products are never left running while something else is done."""
    return [
        function.partition("\n")[0]
        for function in functions(file)
        if "HGMMA" in function and "DEPBAR.LE gsb0, 0x1" not in function
    ]


def counts(file: Path) -> dict[Key, dict[str, float]]:
    """Instructions per weight by name."""
    result = {}
    for function in functions(file):
        small = re.match(r"\S*small_kernelILi(\d+)ELi(\d)ELNS0_7OperandE(\d)ELi(\d)E", function)
        wide = re.match(r"\S*wide_kernelILi(\d+)ELi(\d)ELi(\d+)E", function)
        if small is not None:
            bits, codebook = int(small[1]) / 16, int(small[2])
            key = (bits, CODEBOOKS[codebook], OPERANDS[int(small[3])], 8 * int(small[4]))
            weights = SMALL_WEIGHTS
        elif wide is not None:
            key = (int(wide[1]) / 16, CODEBOOKS[int(wide[2])], "wide", int(wide[3]))
            weights = WIDE_WEIGHTS
        else:
            continue
        names = Counter(op.split(".")[0] for op in main_loop(function))
        result[key] = {name: count / weights for name, count in names.items()}
    return result


def main_loop(function: str) -> list[str]:
    """The instructions of the smallest loop that multiplies matrices."""
    pattern = r"/\*([0-9a-f]{4,5})\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9_.]+)(.*?);"
    code = [(int(at, 16), op, rest) for at, op, rest in re.findall(pattern, function)]
    best: list[str] = []
    for at, op, rest in code:
        target = re.search(r"0x([0-9a-f]+)", rest) if op.startswith("BRA") else None
        if target is None or int(target[1], 16) >= at:
            continue
        body = [name for where, name, _ in code if int(target[1], 16) <= where <= at]
        if any("MMA" in name for name in body) and (not best or len(body) < len(best)):
            best = body
    return best


def table(rows: dict[Key, dict[str, float]]) -> list[str]:
    lines = [
        "| bits | codebook | operand | rows | all | integer pipe | multiply pipe |",
        "|---|---|---|---|---|---|---|",
    ]
    for (bits, codebook, operand, m), count in sorted(rows.items()):
        total, alu, fma = (
            sum(count.get(name, 0.0) for name in names) for names in (count, ALU, FMA)
        )
        lines.append(
            f"| {bits:g} | {codebook} | {operand} | {m} | {total:.2f} | {alu:.2f} | {fma:.2f} |"
        )
    return lines


def more_than(line: str, text: str) -> bool:
    """Whether a row's total exceeds that of the same kernel in the table, by more than rounding."""
    start, total = "|".join(line.split("|")[:5]) + "|", float(line.split("|")[5])
    for known in text.splitlines():
        if known.startswith(start):
            return total > float(known.split("|")[5]) + 0.02
    return True


if __name__ == "__main__":
    sys.exit(main())
