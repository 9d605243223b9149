"""One training step of a plan with fake tensors: the real engine, model and loss, no numbers.

Runs in a process of its own that believes to be rank 0 of the job: torch's fake process group
answers every collective at once.
"""

import contextlib
import dataclasses
import datetime
import math
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from bitsandbytes import functional as bnb
from bitsandbytes import matmul_4bit
from bitsandbytes.nn import Linear4bit
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.integrations.bitsandbytes import replace_with_bnb_linear
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface
from transformers.quantizers.base import get_keys_to_not_convert

from finetune import model as models
from finetune import optim
from finetune.data.batch import MicroBatch
from finetune.engine import Engine
from finetune.errors import FinetuneError
from finetune.planner import Plan
from finetune.quantization import quantization_config
from finetune.verifier.tracker import (
    ADAPTERS,
    CASTS,
    GRADIENTS,
    OPTIMIZER,
    OTHER,
    WEIGHTS,
    Tracker,
)

UNPADDED = "one_kernel_without_mask"
"""SDPA or flash attention as a batch without padding runs it. transformers 5.23 leaves the mask
away there, but not when it sees fake tensors, whose values it cannot look at."""


@dataclasses.dataclass(frozen=True)
class Rehearsed:
    """What a step of a model with so many layers did, in bytes on one rank."""

    layers: int
    parameters: int
    """Elements of the model without its adapter."""
    trained: int
    held: dict[str, int]
    """Bytes that stay from step to step: weights, adapters, optimizer."""
    gradients: int
    """Bytes of gradients before the optimizer's step."""
    saved: int
    """Bytes that layers keep for the backward pass."""
    peaks: dict[str, dict[str, int]]
    """Bytes by label at the largest instant of each moment."""
    collectives: dict[str, dict[str, tuple[int, int]]]
    """Phase, kind: number and payload bytes."""


def join(processes: int) -> None:
    """Become rank 0 of a job whose other ranks answer at once and say nothing."""
    if processes > 1:
        dist.init_process_group("fake", rank=0, world_size=processes, store=FakeStore())


def rehearse(plan: Plan, config: dict[str, Any], sizes: list[int]) -> list[Rehearsed]:
    """Take two steps with each number of layers and measure the second.

    Raises:
        FinetuneError: transformers does not know the model, or it cannot be traced.
    """
    AttentionInterface.register(UNPADDED, _attend_in_one_kernel)
    AttentionMaskInterface.register(UNPADDED, lambda *_, **__: None)
    torch.library.register_fake("aten::_grouped_mm", _grouped_product, allow_override=True)
    with tempfile.TemporaryDirectory(prefix="finetune-") as scratch:
        engine = Engine(plan, Path(scratch), datetime.timedelta(minutes=5))
        steps: list[Rehearsed] = []
        for layers in sizes:
            # A tensor of another mode's would be copied, and its bytes counted twice.
            fake = FakeTensorMode(allow_non_fake_inputs=True)
            network = build(plan, config, layers, fake)
            steps.append(_Step(engine, network, layers, fake).run())
        return steps


def _attend_in_one_kernel(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    **rest: object,
) -> tuple[torch.Tensor, None]:
    """SDPA's kernel for CPUs, whose memory is that of the kernels for GPUs.

    Those drop out and cap scores in registers; on a CPU dropout takes another path, with all
    scores in memory (torch 2.13).
    """
    return sdpa_attention_forward(module, query, key, value, attention_mask, 0.0, scaling)


def _grouped_product(
    a: torch.Tensor,
    b: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """The shape of a product of groups: torch 2.13's own for fake tensors refuses fp32.

    Its kernels do not. Groups are rows of `a` (with a matrix for each in `b`), columns of `b`, or
    what both are summed over.
    """
    assert offs is not None, "experts hold a matrix for each group"
    if a.dim() == 2 and b.dim() == 3:
        return a.new_empty((a.shape[0], b.shape[2]))
    if a.dim() == 3:
        return a.new_empty((a.shape[1], b.shape[1]))
    return a.new_empty((offs.shape[0], a.shape[0], b.shape[1]))


def build(plan: Plan, config: dict[str, Any], layers: int, fake: FakeTensorMode) -> nn.Module:
    """The recipe's model with its adapter, on fake tensors."""
    recipe = plan.recipe
    attention = recipe.model.attention
    implementation = attention if attention == "eager" else UNPADDED
    dtype = torch.float32 if recipe.model.config is not None else models.weight_dtype(plan)
    with torch.device("meta"):
        try:
            network = AutoModelForCausalLM.from_config(
                shortened(config, layers), attn_implementation=implementation, dtype=dtype
            )
        except (ValueError, TypeError, KeyError, ImportError, AttributeError) as error:
            raise FinetuneError(f"--verify: transformers cannot build it: {error}") from None
        if attention == "sdpa" and not network._supports_sdpa:
            raise FinetuneError(
                f"model.attention: transformers has no sdpa for {type(network).__name__}; "
                "set eager or flash_attention_2"
            )
        if recipe.model.quantization != "none":
            _quantise(network, plan)
        network = models.as_trained(network, recipe)
        for module in network.modules():
            _drop_out_as_on_a_gpu(module)
    with fake:
        _materialise(network)
    network.train()
    return network


def shortened(config: dict[str, Any], layers: int) -> PretrainedConfig:
    """The model's configuration with so many layers.

    Raises:
        FinetuneError: transformers does not know the architecture, or where its layers are counted.
    """
    fields = {key: value for key, value in config.items() if key != "layer_types"}
    kind = fields.pop("model_type", None)
    try:
        found = AutoConfig.for_model(kind, **fields)
        types = config.get("layer_types")
        # Fields that hold one entry for each layer are cut with them.
        lists = {
            name: value[:layers]
            for name, value in (fields | ({"layer_types": types} if types else {})).items()
            if isinstance(value, list) and len(value) == found.num_hidden_layers
        }
        attribute = found.attribute_map.get("num_hidden_layers", "num_hidden_layers")
        return AutoConfig.for_model(kind, **(fields | lists | {attribute: layers}))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise FinetuneError(
            f"--verify: model_type {kind!r}: transformers cannot read this config: {error}"
        ) from None


def _quantise(network: PreTrainedModel, plan: Plan) -> None:
    model = plan.recipe.model
    if model.quantization != "nf4":
        raise FinetuneError(
            f"--verify: model.quantization={model.quantization} cannot be traced; plan without it"
        )
    storage = getattr(torch, plan.quant_storage)
    wanted = quantization_config(model.quantization, models.compute_dtype(plan), storage)
    replace_with_bnb_linear(network, get_keys_to_not_convert(network), wanted)
    network.is_loaded_in_4bit = True  # PEFT and Accelerate ask for it
    for module in network.modules():
        if isinstance(module, Linear4bit):
            module.__class__ = _Packed


class _Packed(Linear4bit):
    """A 4-bit layer whose storage is laid out by hand: bitsandbytes packs real numbers only.

    The product and its gradient are bitsandbytes' own.
    """

    def pack(self) -> None:
        elements = self.in_features * self.out_features
        blocks = math.ceil(elements / 64)
        packed = elements // 2 // self.quant_storage.itemsize
        self.weight = nn.Parameter(torch.empty((packed, 1), dtype=self.quant_storage), False)
        inner = bnb.QuantState(
            absmax=torch.empty(math.ceil(blocks / 256)),
            code=torch.empty(256),
            blocksize=256,
            dtype=torch.float32,
        )
        self.quant_state = bnb.QuantState(
            absmax=torch.empty(blocks, dtype=torch.uint8),
            shape=torch.Size((self.out_features, self.in_features)),
            code=torch.empty(16),
            blocksize=64,
            quant_type="nf4",
            dtype=self.compute_dtype,
            offset=torch.empty(()),
            state2=inner,
        )

    def scales(self) -> Iterator[torch.Tensor]:
        state = self.quant_state
        yield from (state.absmax, state.code, state.offset, state.state2.absmax, state.state2.code)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inside = x.to(self.compute_dtype)
        product = matmul_4bit(inside, self.weight, bias=self.bias, quant_state=self.quant_state)
        return product.to(x.dtype)


class _Dropout(nn.Dropout):
    """Dropout as CUDA runs it, with a mask of one byte an element; a CPU's is as wide as inputs."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return torch.native_dropout(input, self.p, self.training)[0]


def _drop_out_as_on_a_gpu(module: nn.Module) -> None:
    if type(module) is nn.Dropout and module.p > 0:
        module.__class__ = _Dropout


def _materialise(network: nn.Module) -> None:
    """Give every parameter and buffer a fake tensor on the CPU in place of one on `meta`."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in network.modules():
        if isinstance(module, _Packed):
            module.pack()
            continue
        for name, old in module.named_parameters(recurse=False):
            if old not in made:  # tied weights are one
                new = torch.empty(old.shape, dtype=old.dtype, device="cpu")
                made[old] = nn.Parameter(new, old.requires_grad)
            module.register_parameter(name, made[old])
        for name, buffer in module.named_buffers(recurse=False):
            persistent = name not in module._non_persistent_buffers_set
            new = torch.empty(buffer.shape, dtype=buffer.dtype, device="cpu")
            module.register_buffer(name, new, persistent)


def _counts(network: nn.Module) -> tuple[int, int]:
    """Trained and all elements; packed weights count as what they hold."""
    packed = [module for module in network.modules() if isinstance(module, _Packed)]
    held = {module.weight: module.in_features * module.out_features for module in packed}
    trained = sum(p.numel() for p in network.parameters() if p.requires_grad)
    return trained, sum(held.get(p, p.numel()) for p in network.parameters())


def layers_of(network: nn.Module, count: int) -> list[nn.Module]:
    """The transformer's layers.

    Raises:
        FinetuneError: no list of modules has so many.
    """
    for module in network.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return list(module)
    raise FinetuneError(f"--verify: no list of {count} layers in {type(network).__name__}")


class _Step:
    """One step of the second kind, when the optimizer's moments exist, under the tracker."""

    def __init__(
        self, engine: Engine, network: nn.Module, layers: int, fake: FakeTensorMode
    ) -> None:
        self.engine, self.plan, self.count = engine, engine.plan, layers
        self.layers = layers_of(network, layers)
        self.trained, whole = _counts(network)
        self.parameters = whole - (self.trained if engine.plan.recipe.adapter else 0)
        self.packed = [module for module in network.modules() if isinstance(module, _Packed)]
        self.fake, self.tracker = fake, Tracker()
        self.forwards = False
        self.saved: int | None = None
        self.before = 0
        for index, layer in enumerate(self.layers):  # before the engine's own hooks
            self._watch(index, layer)
        head = network.get_output_embeddings()
        if head is not None:  # what follows is autocast's end, which belongs to no moment
            head.register_forward_hook(lambda *_: self.tracker.begin(""))
        self._prepare(network)
        engine.model.register_forward_hook(lambda *_: self.tracker.begin("forward: loss"))
        recipe = self.plan.recipe
        self.shape = (recipe.batch.micro_rows, recipe.batch.max_length)

    def _prepare(self, network: nn.Module) -> None:
        """`Engine.prepare` in two parts: Accelerate 1.15 finds FSDP2's parameters by address."""
        engine = self.engine
        if self.plan.backend.engine == "fsdp":
            engine.model = fsdp2_prepare_model(engine.accelerator, network)
        else:
            engine.model = engine.accelerator.prepare_model(network, device_placement=False)
        engine.optimizers = optim.build(
            engine.model, self.plan.recipe.optim, self.plan.lr, engine.device
        )

    def _watch(self, index: int, layer: nn.Module) -> None:
        """Begin a moment where the forward or the backward pass enters this layer."""
        last = self.count - 1
        names = {last: "last layer", last - 1: "last layer but one", 0: "first layer"}
        # Layers between hold less than the last but one: they are no moment.
        name = f"backward: {names[index]}" if index in names else ""

        def enter(_: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
            if not self.forwards:
                return  # a checkpoint runs it again
            (hidden,) = [*given, *named.values()][:1]
            if index == 0:
                self._enter_first(hidden)
            self.tracker.begin("forward: last layer" if index == last else "")

        def leave(_: nn.Module, given: object, result: Any) -> None:
            if not self.forwards:
                return
            output = result[0] if isinstance(result, tuple) else result
            output.register_hook(lambda _: self.tracker.begin(name))
            if index == last:
                self._leave_last(output)

        layer.register_forward_pre_hook(enter, with_kwargs=True)
        layer.register_forward_hook(leave)

    def _enter_first(self, hidden: torch.Tensor) -> None:
        if self.saved is None:
            self.before = self._kept() - hidden.untyped_storage().nbytes()
        if hidden.requires_grad:
            hidden.register_hook(lambda _: self.tracker.begin("backward: embedding"))

    def _leave_last(self, output: torch.Tensor) -> None:
        if self.saved is None:
            self.saved = self._kept() - output.untyped_storage().nbytes() - self.before
        self.tracker.begin("forward: head")

    def _kept(self) -> int:
        """Live bytes that products keep: casts of weights too where no checkpoint drops them."""
        parts = self.tracker.parts()
        checkpointed = self.plan.recipe.model.activation_checkpointing
        return parts.get(OTHER, 0) + (0 if checkpointed else parts.get(CASTS, 0))

    def run(self) -> Rehearsed:
        with self.fake:
            self._micro_batch(last=True)
            self.engine.step(self.plan.lr)
            self.saved = None
            held = self._hold()
            with self.tracker:
                gradients = self._step()
        return Rehearsed(
            layers=self.count,
            parameters=self.parameters,
            trained=self.trained,
            held=held,
            gradients=gradients,
            saved=self.saved or 0,
            peaks={name: peak.parts for name, peak in self.tracker.peaks.items()},
            collectives=self._collectives(),
        )

    def _hold(self) -> dict[str, int]:
        """Tell the tracker what stays from step to step; returns its bytes by label."""
        model, tracker = self.engine.model, self.tracker
        adapted = self.plan.recipe.adapter is not None
        trained = [p for p in model.parameters() if p.requires_grad]
        frozen = [p for p in model.parameters() if not p.requires_grad]
        tracker.hold([*frozen, *model.buffers()], WEIGHTS)
        for module in self.packed:
            tracker.hold(module.scales(), WEIGHTS)
        tracker.hold(trained, ADAPTERS if adapted else WEIGHTS)
        for optimizer in self.engine.optimizers:
            for state in optimizer.state.values():
                tensors = [value for value in state.values() if isinstance(value, torch.Tensor)]
                tracker.hold(tensors, OPTIMIZER)
        for parameter in trained:
            parameter.register_post_accumulate_grad_hook(self._label_gradient)
        return tracker.parts()

    def _label_gradient(self, parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            self.tracker.hold([parameter.grad], GRADIENTS)

    def _step(self) -> int:
        """The step that is measured; returns the bytes of its gradients."""
        tracker = self.tracker
        earlier = ("first", "middle")[: self.plan.accumulation - 1]
        for tracker.phase in earlier:
            self._micro_batch(last=False)
            tracker.relabel(OTHER, GRADIENTS)
        tracker.phase = "last"
        self._micro_batch(last=True)
        grads = [p.grad for p in self.engine.model.parameters() if p.grad is not None]
        tracker.hold(grads, GRADIENTS)
        gradients = tracker.parts().get(GRADIENTS, 0)
        tracker.phase = "update"
        tracker.begin("optimizer step")
        self.engine.step(self.plan.lr)
        return gradients

    def _micro_batch(self, last: bool) -> None:
        """Forward and backward pass as `train_step` runs them."""
        recipe, engine, tracker = self.plan.recipe, self.engine, self.tracker
        tracker.begin("forward: embedding")
        ids = torch.zeros(self.shape, dtype=torch.int64)
        batch = MicroBatch(ids, ids, None, self.shape[0], ids.numel(), ids.numel())
        with engine.unsynchronised(last), _autocast_as_on_a_gpu(engine):
            self.forwards = True
            loss = recipe.loss(engine.model, batch)
            self.forwards = False
            tracker.begin("backward: loss and head")
            engine.backward(loss * 1.0, last)

    def _collectives(self) -> dict[str, dict[str, tuple[int, int]]]:
        found: dict[str, dict[str, tuple[int, int]]] = {}
        for each in self.tracker.collectives:
            phase = found.setdefault(each.phase, {})
            number, payload = phase.get(each.kind, (0, 0))
            phase[each.kind] = (number + 1, payload + each.payload)
        return found


@contextlib.contextmanager
def _autocast_as_on_a_gpu(engine: Engine) -> Iterator[None]:
    """PEFT 0.21 asks whether CUDA's autocast is on before it casts a 4-bit layer's input."""
    torch.set_autocast_enabled("cuda", engine.accelerator.native_amp)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cuda", False)
