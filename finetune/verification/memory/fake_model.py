"""Build the recipe's model on fake tensors, with a few layers, as a GPU would run it."""

import importlib.util
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel
from transformers.integrations.bitsandbytes import replace_with_bnb_linear
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface
from transformers.quantizers.base import get_keys_to_not_convert

from finetune.distributed.base import Engine
from finetune.distributed.layers import divide
from finetune.distributed.mesh import MeshEngine
from finetune.errors import FinetuneError, reading
from finetune.kernels.head import LabelledHead
from finetune.kernels.quantised import Linear4bit, QuantState, matmul_4bit
from finetune.models import image_parts
from finetune.models import model as models
from finetune.models.quantization import quantization_config
from finetune.models.scoring import auto_class
from finetune.models.soundness import hold_in_fp32
from finetune.planner import Plan
from finetune.planner.kernels import GPU_CHUNK_ENTRIES, GPU_TILE_ENTRIES

UNPADDED = "one_kernel_without_mask"
"""SDPA or flash attention for a batch without padding. transformers 5.23 omits the mask of such a
batch, but not with fake tensors, whose values it cannot read."""


def register() -> None:
    """Register the replacements below with transformers and torch, for this process."""
    AttentionInterface.register(UNPADDED, _attend_in_one_kernel)
    AttentionMaskInterface.register(UNPADDED, lambda *_, **__: None)
    torch.library.register_fake("aten::_grouped_mm", _grouped_product, allow_override=True)
    if importlib.util.find_spec("transformers.distributed.expert_parallel") is None:
        return  # transformers 5.17 has no such module
    from finetune.verification.memory import balanced_experts

    balanced_experts.register()


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
    """SDPA's CPU kernel, which uses as much memory as the GPU kernels.

    GPU kernels apply dropout and soft-capping in registers. On a CPU, dropout would take another
    path, with all scores in memory (torch 2.13).
    """
    return sdpa_attention_forward(module, query, key, value, attention_mask, 0.0, scaling)


def _grouped_product(
    a: torch.Tensor,
    b: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """The shape of a grouped product; torch 2.13's own fake implementation refuses fp32.

    Its kernels support fp32. Groups are rows of `a` (with one matrix each in `b`), columns of `b`,
    or the dimension that is summed over.
    """
    assert offs is not None, "experts hold a matrix for each group"
    if a.dim() == 2 and b.dim() == 3:
        return a.new_empty((a.shape[0], b.shape[2]))
    if a.dim() == 3:
        return a.new_empty((a.shape[1], b.shape[1]))
    return a.new_empty((offs.shape[0], a.shape[0], b.shape[1]))


def build(engine: Engine, config: dict[str, Any], layers: int, fake: FakeTensorMode) -> nn.Module:
    """What the engine's process holds of the recipe's model with its adapter, on fake tensors."""
    plan = engine.plan
    recipe = plan.recipe
    attention = recipe.model.attention
    implementation = attention if attention == "eager" else UNPADDED
    dtype = torch.float32 if recipe.model.config is not None else models.weight_dtype(plan)
    with torch.device("meta"):
        try:
            short = shortened(config | recipe.head.config, layers, bool(recipe.model.reads))
            chosen: Any = engine.attention(short, implementation)
            if recipe.model.reads:
                chosen = image_parts.attention_by_part(short, implementation, attention)
            network = auto_class(recipe.head, recipe.model.reads).from_config(
                short, attn_implementation=chosen, dtype=dtype
            )
            if isinstance(engine, MeshEngine):
                network: Any = divide(
                    network, engine.meshes, torch.device("meta"), plan.backend.axes
                )
        except (ValueError, TypeError, KeyError, ImportError, AttributeError) as error:
            if isinstance(error, KeyError) and error.args == (UNPADDED,):
                raise FinetuneError(
                    f"model.attention: {config['model_type']} has its own attention kernels, which "
                    "cannot be traced; set model.attention=eager"
                ) from None
            raise FinetuneError(f"--verify: transformers cannot build it: {error}") from None
        if attention == "sdpa" and not network._supports_sdpa and not plan.padding.free:
            raise FinetuneError(
                f"model.attention: transformers has no sdpa for {type(network).__name__}; "
                "set eager or flash_attention_2"
            )
        if recipe.model.quantization != "none":
            quantise(network, plan)
        recipe = image_parts.within_parts(network, recipe)
        base, network = network, models.as_trained(network, recipe)
        if not (plan.traits.masters or plan.widens_shards):
            hold_in_fp32(network)
        models.install_kernels(base, plan)
        for module in network.modules():
            _compute_as_on_a_gpu(module)
    with fake:
        pack(network)
        _materialise(network)
    network.train()
    return network


def shortened(config: dict[str, Any], layers: int, reads: bool = False) -> PretrainedConfig:
    """The model's config with `layers` layers, which are those of text if it `reads` images.

    Raises:
        FinetuneError: transformers does not know the architecture or its number of layers.
    """
    fields = {key: value for key, value in config.items() if key != "layer_types"}
    kind = fields.pop("model_type", None)
    with reading(f"--verify: model_type {kind!r}: transformers cannot read this config"):
        found = AutoConfig.for_model(kind, **fields)
        if reads:
            text = found.get_text_config()
            short = shortened(text.to_dict(), layers)
            (name,) = (each for each in found.sub_configs if getattr(found, each) is text)
            return AutoConfig.for_model(kind, **(fields | {name: short.to_dict()}))
        types = config.get("layer_types")
        # Fields with one entry per layer are shortened or repeated as well.
        lists = {
            name: (value * layers)[:layers]
            for name, value in (fields | ({"layer_types": types} if types else {})).items()
            if isinstance(value, list) and len(value) == found.num_hidden_layers
        }
        attribute = found.attribute_map.get("num_hidden_layers", "num_hidden_layers")
        return AutoConfig.for_model(kind, **(fields | lists | {attribute: layers}))


def quantise(network: PreTrainedModel, plan: Plan) -> None:
    """Replace the linear layers that bitsandbytes would pack, without packing them."""
    model = plan.recipe.model
    if model.quantization != "nf4":
        raise FinetuneError(
            f"--verify: model.quantization={model.quantization} cannot be traced; plan without it"
        )
    storage = getattr(torch, plan.quant_storage)
    wanted = quantization_config(model.quantization, models.compute_dtype(plan), storage)
    left = get_keys_to_not_convert(network)
    if model.reads:
        left = image_parts.unquantised(network.config)
    replace_with_bnb_linear(network, left, wanted)
    network.is_loaded_in_4bit = True  # PEFT and Accelerate check it


class Packed(Linear4bit):
    """A 4-bit layer with manually created storage, because bitsandbytes cannot pack fake tensors.

    The product and its gradient are bitsandbytes' own.
    """

    def pack(self) -> None:
        elements = self.in_features * self.out_features
        blocks = math.ceil(elements / 64)
        packed = elements // 2 // self.quant_storage.itemsize
        self.weight = nn.Parameter(torch.empty((packed, 1), dtype=self.quant_storage), False)
        if self.bias is not None:  # loading casts it to the compute dtype
            bias = torch.empty(self.out_features, dtype=self.compute_dtype)
            self.bias = nn.Parameter(bias, False)
        inner = QuantState(
            absmax=torch.empty(math.ceil(blocks / 256)),
            code=torch.empty(256),
            blocksize=256,
            dtype=torch.float32,
        )
        self.quant_state = QuantState(
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
    """Dropout as on CUDA, with a mask of one byte per element; a CPU's has the input's dtype."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return torch.native_dropout(input, self.p, self.training)[0]


def _compute_as_on_a_gpu(module: nn.Module) -> None:
    if type(module) is nn.Dropout and module.p > 0:
        module.__class__ = _Dropout
    if isinstance(module, LabelledHead):
        module.entries = (GPU_CHUNK_ENTRIES, GPU_TILE_ENTRIES)


def pack(network: nn.Module) -> None:
    """Give the 4-bit layers of a network with its kernels fake weights and scales."""
    for module in network.modules():
        if type(module) is Linear4bit:  # the kernels were installed for the real class
            module.__class__ = Packed
            module.pack()


def _materialise(network: nn.Module) -> None:
    """Replace every `meta` parameter and buffer by a fake tensor on the CPU."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in network.modules():
        if isinstance(module, Packed):
            continue
        for name, old in module.named_parameters(recurse=False):
            if old not in made:  # tied weights share one tensor
                made[old] = nn.Parameter(_empty_like(old.data), old.requires_grad)
            module.register_parameter(name, made[old])
        for name, buffer in module.named_buffers(recurse=False):
            persistent = name not in module._non_persistent_buffers_set
            new = torch.empty(buffer.shape, dtype=buffer.dtype, device="cpu")
            module.register_buffer(name, new, persistent)


def _empty_like(tensor: torch.Tensor) -> torch.Tensor:
    if not isinstance(tensor, DTensor):
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    part = torch.empty(tensor.to_local().shape, dtype=tensor.dtype, device="cpu")
    return DTensor.from_local(
        part, tensor.device_mesh, tensor.placements, run_check=False,
        shape=tensor.shape, stride=tensor.stride(),
    )  # fmt: skip


def counts(network: nn.Module) -> tuple[int, int]:
    """Numbers of trained and of all elements; packed weights count unpacked."""
    packed = [module for module in network.modules() if isinstance(module, Packed)]
    sizes = {module.weight: module.in_features * module.out_features for module in packed}
    trained = sum(p.numel() for p in network.parameters() if p.requires_grad)
    return trained, sum(sizes.get(p, p.numel()) for p in network.parameters())


def layers_of(network: nn.Module, count: int) -> list[nn.Module]:
    """The transformer's layers.

    Raises:
        FinetuneError: no list of modules has `count` entries.
    """
    for module in network.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return list(module)
    raise FinetuneError(f"--verify: no list of {count} layers in {type(network).__name__}")
