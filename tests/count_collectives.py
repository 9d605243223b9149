"""Run `finetune` and write the bytes of each collective of its first step: FOLDER WORDS..."""

import collections
import json
import sys

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from finetune.cli import run
from finetune.training import steps

folder, sys.argv = sys.argv[1], sys.argv[:1] + sys.argv[2:]
NAMES = {
    "all-reduce": ("all_reduce", "allreduce_"),
    "send": ("send",),
    "all-gather": ("all_gather_into_tensor", "_allgather_base_"),
    "reduce-scatter": ("reduce_scatter_tensor", "_reduce_scatter_base_"),
    "all-to-all": ("all_to_all_single", "alltoall_base_"),
}
KINDS = {name: kind for kind, names in NAMES.items() for name in names}
PARTS = {"all_gather_into_tensor", "_reduce_scatter_base_"}  # whose first argument is one part


def group_of(arguments):
    for each in arguments:
        if isinstance(each, str) and each not in ("sum", "avg", "max"):
            return torch.distributed.distributed_c10d._resolve_process_group(each)
        if isinstance(each, torch.ScriptObject) and "ProcessGroup" in str(each._type()):
            return torch.distributed.ProcessGroup.unbox(each)
    raise AssertionError(arguments)


class Counting(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.sizes = collections.defaultdict(lambda: collections.defaultdict(int))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # what DTensor makes of it comes by as well
        space, name = func.name().split("::")
        kind = KINDS.get(name.split(".")[0])
        if "c10d" in space and kind:
            given = args[0] if isinstance(args[0], (list, tuple)) else [args[0]]
            group = group_of(args)
            ranks = torch.distributed.get_process_group_ranks(group)
            several = len(ranks) if name.split(".")[0] in PARTS else 1
            axis = "tensor" if ranks[-1] - ranks[0] == len(ranks) - 1 else "pipeline"
            axis = axis if len(ranks) < torch.distributed.get_world_size() else "all"
            self.sizes[axis][kind] += several * sum(each.nbytes for each in given)
        return func(*args, **(kwargs or {}))


step = steps.train_step


def counted(engine, feed, number, *others):
    if number:
        return step(engine, feed, number, *others)
    taken = []
    take = feed.take
    feed.take = lambda at: taken.append(take(at)) or taken[-1]
    with Counting() as found:
        result = step(engine, feed, number, *others)
    feed.take = take
    batches = taken[0].batches
    about = {"tokens": batches[0].ids.numel(), "labelled": sum(b.trained_tokens for b in batches)}
    with open(f"{folder}/counted-{engine.rank}.json", "w") as file:
        json.dump(about | found.sizes, file)
    return result


steps.train_step = counted
run()
