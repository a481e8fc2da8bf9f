"""Metadata of checkpoints whose routed experts alone are EXL3, often in rank slices.

Their ``quantization_config`` may name another method (modelopt) and say nothing of it; the entry
``hybrid_tr3_tail`` of config.json does. What it declares has to agree with what the files hold.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..formats.experts import ExpertSet

FORMAT = "exl3-trellis"
SCHEMA = "model.layers.{L}.mlp.experts.{E}.{proj}.rank{r}.{trellis|suh|svh|mcg}"
R7_SCHEMA = "r7-complete-v2-checkpoint-v1"
LAYOUTS = ("per_expert_v1", "shared_h_v1")
REQUIRED = ("bits", "codebook", "experts_per_layer", "moe_layers", "tensor_schema", "tp")
BITS = (2, 3, 4, 5, 6)


def tail_of(config: Any) -> dict | None:
    """The entry of a model's config that tells of EXL3 experts, if there is one."""
    return tail_of_dict(getattr(config, "hybrid_tr3_tail", None))


def tail_of_dict(entry: Any) -> dict | None:
    """The entry, if it is of EXL3 experts."""
    return entry if isinstance(entry, dict) and entry.get("format") == FORMAT else None


def check_tail(tail: Mapping[str, Any]) -> None:
    """Raises ValueError where the entry is incomplete, or says what is not supported."""
    missing = [name for name in REQUIRED if tail.get(name) is None]
    if missing:
        raise _fault(f"lacks {', '.join(missing)}")
    if tail["codebook"] != "mcg":
        raise _fault(f"codebook is {tail['codebook']!r}, expected 'mcg'")
    layers = tail["moe_layers"]
    if (
        not isinstance(layers, list)
        or len(layers) != 2
        or not all(_is_int(layer) and layer >= 0 for layer in layers)
        or layers[1] < layers[0]
    ):
        raise _fault(f"moe_layers is {layers!r}, expected [first, last]")
    if tail["tensor_schema"] != SCHEMA:
        raise _fault(f"tensor_schema is {tail['tensor_schema']!r}, expected {SCHEMA!r}")
    for name in ("tp", "experts_per_layer"):
        if not _is_int(tail[name]) or tail[name] < 1:
            raise _fault(f"{name} is {tail[name]!r}, expected a positive int")
    bits = tail["bits"]
    if bits != "mixed" and bits not in BITS:
        raise _fault(f"bits is {bits!r}, expected one of {BITS}, or 'mixed'")
    layout = tail.get("rotation_layout", LAYOUTS[0])
    if layout not in LAYOUTS:
        raise _fault(f"rotation_layout is {layout!r}, expected one of {LAYOUTS}")
    if tail.get("nvfp4_keep_per_layer"):
        raise _fault(
            f"nvfp4_keep_per_layer is {tail['nvfp4_keep_per_layer']!r}, expected 0: "
            "experts in NVFP4 beside EXL3 ones are not supported"
        )


def check_tail_against(
    tail: Mapping[str, Any], sets: Mapping[str, ExpertSet], layers: int, folder: Path
) -> None:
    """Raises ValueError where the entry and the files disagree.

    Args:
        sets: the experts of every layer, by name.
        layers: of the model; those from there on are not run.
        folder: where the file is that ``bits_per_expert`` names, if it is at hand.
    """
    by_layer = {int(m[1]): s for n, s in sets.items() if (m := re.search(r"layers\.(\d+)\.", n))}
    first, last = tail["moe_layers"]
    wanted = set(range(first, min(last, layers - 1) + 1))
    for layer in sorted(wanted ^ set(by_layer)):
        said, held = ("no", "some") if layer in by_layer else ("some", "none")
        raise _fault(
            f"moe_layers is {tail['moe_layers']}: {said} experts in layer {layer}, "
            f"and the files hold {held}"
        )
    plan = _planned_bits(tail, folder)
    for layer, experts in by_layer.items():
        declared = {
            "tp": (tail["tp"], experts.slices),
            "experts_per_layer": (tail["experts_per_layer"], experts.experts),
            "rotation_layout": (tail.get("rotation_layout", LAYOUTS[0]), _layout(experts)),
        }
        for name, (said, held) in declared.items():
            if said != held:
                raise _fault(f"{name} is {said!r}, and {experts.name} has {held!r}")
        for (projection, expert, _), group in experts.matrices.items():
            bits = plan[str(layer)][expert] if plan else tail["bits"]
            if bits not in ("mixed", group.bits):
                raise _fault(
                    f"{projection} of expert {expert} in layer {layer} has {bits} bits, "
                    f"and {group.name}.trellis has {group.bits}"
                )


def _layout(experts: ExpertSet) -> str:
    # Where it is whole, its only slice may go without a number.
    return LAYOUTS[0] if experts.layout == "per_expert" else experts.layout


def _planned_bits(tail: Mapping[str, Any], folder: Path) -> dict[str, list[int]] | None:
    """Layer -> bits of each expert, as the file beside the weights has it."""
    place = tail.get("bits_per_expert")
    if not isinstance(place, str):
        return None
    name, colon, field = place.partition(":")
    if not colon or Path(name).name != name:
        raise _fault(f"bits_per_expert is {place!r}, expected 'file.json:field'")
    file = folder / name
    if not file.is_file():
        return None
    try:
        plan = {}
        for layer, entry in json.loads(file.read_text(encoding="utf-8")).items():
            # The layer for multi-token prediction may have no such field: it is all of one rate.
            if field in entry:
                plan[layer] = [int(bits) for bits in entry[field]]
        if any(len(bits) != tail["experts_per_layer"] for bits in plan.values()):
            raise ValueError("a layer has not experts_per_layer entries")
        return plan
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{file}: {field} is no list of bits for each layer: {error}") from error


def check_r7(entry: Any, sets: Mapping[str, ExpertSet]) -> None:
    """The entry ``r7_routed_experts`` of a quantization_config."""
    if not isinstance(entry, dict) or entry.get("schema") != R7_SCHEMA:
        got = entry.get("schema") if isinstance(entry, dict) else entry
        raise ValueError(f"r7_routed_experts: schema is {got!r}, expected {R7_SCHEMA!r}")
    if entry.get("codebook", "mcg") != "mcg":
        raise ValueError(f"r7_routed_experts: codebook is {entry['codebook']!r}, expected 'mcg'")
    for experts in sets.values():
        if experts.layout != "r7":
            raise ValueError(
                f"r7_routed_experts: {experts.name} has no r7_shared vectors, expected them"
            )


def unshare(config: Any, quantization: Any) -> None:
    """Brings metadata up to date with a saved model, where each expert has its own vectors."""
    tail = tail_of(config)
    if tail is not None:
        unshare_tail(tail)
    if hasattr(quantization, "r7_routed_experts"):
        del quantization.r7_routed_experts


def unshare_tail(tail: dict) -> None:
    """The same of the entry itself."""
    if tail.get("rotation_layout") == "shared_h_v1":
        tail["rotation_layout"] = "per_expert_v1"
        tail.pop("shared_h_tensor_schema", None)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _fault(problem: str) -> ValueError:
    return ValueError(f"hybrid_tr3_tail: {problem}")
