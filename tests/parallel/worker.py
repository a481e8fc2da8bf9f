"""Run by torchrun: loads models split over the processes, and writes down what they compute.

Usage: worker.py RESULT FOLDER... with a checkpoint in each folder.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import transformers

import trellis_ops
from trellis_ops.formats.reading import Reader
from trellis_ops.parallel import sharded

read = 0


class Counted:
    """A handle of a tensor on disk that counts what is read of the words."""

    def __init__(self, handle, counts):
        self.handle, self.counts = handle, counts

    def __getitem__(self, part):
        global read
        tensor = self.handle[part]
        read += tensor.nbytes if self.counts else 0
        return tensor


def counting(self, tensor, original=Reader.slice):
    return Counted(original(self, tensor), tensor.name.endswith(".trellis"))


def main(result, folders):
    global read
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    Reader.slice = counting
    dist.init_process_group("gloo")
    ids = torch.arange(3, 27)[None]
    found = {}
    for folder in folders:
        read = 0
        with sharded():
            model = transformers.AutoModelForCausalLM.from_pretrained(folder)
        words = read
        logits = model(ids).logits
        kinds = {
            name: type(module).__name__
            + str(getattr(module, "gather", getattr(module, "split", "")))
            for name, module in model.named_modules()
            if type(module).__module__.startswith("trellis_ops") and ".part" not in name
        }
        same = True
        if dist.get_world_size() == 2:  # what is traced does not depend on how many there are
            torch._dynamo.reset()
            compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
            with torch.inference_mode():
                same = torch.equal(compiled(ids).logits, logits)
        try:
            model.save_pretrained(Path(result).parent / "never")
            saved = "saved"
        except ValueError as error:
            saved = str(error)
        everybody = [None] * dist.get_world_size()
        dist.all_gather_object(everybody, (logits, words, kinds, same, saved))
        found[Path(folder).name] = everybody
    if dist.get_rank() == 0:
        torch.save(found, result)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    assert trellis_ops.__version__
    main(sys.argv[1], sys.argv[2:])
    # Threads of gloo now and then abort a process whose interpreter is shutting down (pytorch/pytorch#179291).
    sys.stdout.flush()
    os._exit(0)
