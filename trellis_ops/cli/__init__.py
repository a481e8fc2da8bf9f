"""The commands of ``python -m trellis_ops``: one module each, with add_parser() and run().

A command raises ValueError or OSError for what a user can mend; main() turns that into one sentence
and exit code 2. Anything else is a bug, and shows its traceback.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from . import bench, convert, dequantize, env, inspect

COMMANDS = (env, inspect, convert, dequantize, bench)


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="python -m trellis_ops", description="Tools for EXL3 quantised weights."
    )
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for module in COMMANDS:
        module.add_parser(commands).set_defaults(run=module.run)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit code of the process."""
    options = parser().parse_args(arguments)
    try:
        return options.run(options)
    except (ValueError, OSError) as error:
        print(f"trellis_ops {options.command}: {error}", file=sys.stderr)
        return 2
