"""Forward passes of the product with fake tensors on a GPU, on a machine without one.

A fake tensor has a shape, a type and a device, and no values: an operation that needs a value, for
which a GPU would have to be waited for, ends the pass with an error.
"""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
import torch
from architectures import FIELDS, SIZES
from documents import documents_of
from test_packing import documents, packs
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from finetune.data.rows.collate import MicroBatch, collate
from finetune.data.rows.store import Rows
from finetune.methods.losses import token_loss_sum
from finetune.methods.sft import SFT
from finetune.models.model import as_trained, install_kernels, weight_dtype
from finetune.models.packed_attention import against_varlen, implementation
from finetune.models.soundness import hold_in_fp32
from finetune.planner import plan
from finetune.planner.plan import Plan
from finetune.recipe import Batch, Data, LoRA, Model
from finetune.verification.memory import fake_model

HOPPER = (9, 0)
Way = Literal["rows", "equal rows", "side by side", "packs", "shared prompts"]
PADDED = ("rows", "equal rows")


class Seen(TorchDispatchMode):
    """The operations of a pass, and what came to the host."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.left: list[str] = []
        """Operations that take a tensor on the GPU and give one that is not there."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        self.names.append(str(func))
        given = torch.utils._pytree.tree_leaves((args, kwargs))
        on_gpu = any(isinstance(each, torch.Tensor) and each.is_cuda for each in given)
        for each in torch.utils._pytree.tree_leaves(found):
            if on_gpu and isinstance(each, torch.Tensor) and not each.is_cuda:
                self.left.append(str(func))
        return found

    def count(self, part: str) -> int:
        """Operations whose name has a part."""
        return sum(part in name for name in self.names)


@dataclasses.dataclass(frozen=True)
class Pass:
    """What a forward pass of a model was."""

    loss: torch.Tensor
    seen: Seen
    layers: int
    elsewhere: list[str]
    """Parameters and buffers that are not on the GPU."""
    packed: int
    """Number of layers whose weights are in 4 bits."""


@contextlib.contextmanager
def gpu(capability: tuple[int, int] = HOPPER) -> Iterator[None]:
    """Inside, tensors are fake, and GPUs say that they are of a compute capability."""
    asked, moved = torch.cuda.get_device_capability, torch.nn.Module.to
    torch.cuda.get_device_capability = lambda *_: capability
    torch.nn.Module.to = lambda self, *_, **__: self  # all is there; fake tensors cannot be moved
    try:
        with FakeTensorMode():
            yield
    finally:
        torch.cuda.get_device_capability, torch.nn.Module.to = asked, moved
        against_varlen.cache_clear()


@contextlib.contextmanager
def autocast(on: bool) -> Iterator[None]:
    """CUDA's, which `torch.autocast` switches off by itself where there is no GPU."""
    torch.set_autocast_enabled("cuda", on)
    torch.set_autocast_dtype("cuda", torch.bfloat16)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cuda", False)


def recipe_of(kind: str, adapter: bool, way: Way, **fields: Any) -> SFT:
    """A recipe that trains a tiny model of a kind on rows laid out in a way."""
    sizes = {"model_type": kind} | SIZES | FIELDS.get(kind, {}) | fields
    return SFT(
        model=Model(config=sizes, tokenizer="none"),
        data=(Data("none", "chat"),),
        adapter=LoRA(r=8) if adapter else None,
        batch=Batch(
            rows=8, micro_rows=8, max_length=64, packing=way == "packs",
            padding_free=False if way in PADDED else "auto",
        ),
    )  # fmt: skip


def twice(rows: Rows) -> Rows:
    """Each document two times, which share their first half."""
    given = [rows.documents.document(number)[0] for number in range(len(rows))]
    halves = documents_of((ids, np.arange(len(ids)) >= len(ids) // 2) for ids in given)
    members = np.repeat(np.arange(len(given)), 2)
    bounds = np.arange(len(members) + 1)
    return Rows(halves, members, bounds, packed=False, padding_free=True, share_prompts=True)


def equal(rows: Rows) -> Rows:
    """The documents that are as long as the longest, and no others."""
    lengths = rows.lengths
    members = np.flatnonzero(lengths == lengths.max())
    return dataclasses.replace(rows, members=members, bounds=np.arange(len(members) + 1))


def fake_batch(way: Way) -> MicroBatch:
    """Documents as one micro-batch, whose tensors are fake and on the GPU."""
    rows = documents()
    if way == "equal rows":
        rows = equal(rows)
    elif way not in PADDED:
        rows = packs(rows) if way == "packs" else dataclasses.replace(rows, padding_free=True)
    if way == "shared prompts":
        rows = twice(rows)
    made = collate(rows, np.arange(len(rows)), 0, "cpu")

    def moved(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return torch.empty(value.shape, dtype=value.dtype, device="cuda")
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            parts = {each.name: moved(getattr(value, each.name)) for each in
                     dataclasses.fields(value)}  # fmt: skip
            return dataclasses.replace(value, **parts)
        return value

    return moved(made)


def forward(
    kind: str,
    adapter: bool = False,
    way: Way = "packs",
    capability: tuple[int, int] = HOPPER,
    nf4: bool = False,
    **fields: Any,
) -> Pass:
    """A forward pass of a tiny model of a kind as one process trains it, in bf16 on a GPU."""
    settled = plan(recipe_of(kind, adapter, way, **fields), "single", 1, "bf16")
    if nf4:  # a plan of NF4 needs a folder of weights
        model = dataclasses.replace(settled.recipe.model, quantization="nf4")
        recipe = dataclasses.replace(settled.recipe, model=model)
        settled = dataclasses.replace(settled, recipe=recipe)
    with gpu(capability):
        batch = fake_batch(way)
        network, trained = built(settled)
        with Seen() as seen, autocast(True):
            loss = token_loss_sum(trained, batch)
    held = [*network.named_parameters(), *network.named_buffers()]
    elsewhere = [name for name, tensor in held if not tensor.is_cuda]
    packed = sum(isinstance(module, fake_model.Packed) for module in network.modules())
    return Pass(loss, seen, network.config.num_hidden_layers, elsewhere, packed)


def built(settled: Plan, device: str = "cuda") -> tuple[Any, torch.nn.Module]:
    """The network of a plan on the GPU, alone and as it is trained."""
    fields = dict(settled.recipe.model.config or {})
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    with torch.device(device):
        network = AutoModelForCausalLM.from_config(
            config,
            attn_implementation=implementation(settled.recipe, config),
            dtype=weight_dtype(settled),
        )
        if settled.recipe.model.quantization != "none":
            with unset_fake_temporarily(), torch.device("meta"):  # packed below
                fake_model.quantise(network, settled)
        trained = as_trained(network, settled.recipe)
    hold_in_fp32(trained)
    install_kernels(network, settled)
    with torch.device(device):
        fake_model.pack(network)
    return network, trained.train()
