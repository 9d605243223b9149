"""Shapes of a decoder: layers, matrices and parameter counts."""

import dataclasses
import functools
from typing import Literal

Activation = Literal["silu", "gelu_tanh", "gelu", "gelu_new"]
"""Activation functions. `gelu_new` (GPT-2) is eight operations; the others are one kernel each."""


@dataclasses.dataclass(frozen=True)
class Matrix:
    """A linear layer inside a decoder layer."""

    name: str
    """Path inside the decoder layer, such as `self_attn.q_proj`."""
    inputs: int
    outputs: int
    bias: bool = False

    @property
    def weights(self) -> int:
        return self.inputs * self.outputs

    @property
    def parameters(self) -> int:
        return self.weights + (self.outputs if self.bias else 0)

    @property
    def leaf(self) -> str:
        return self.name.rsplit(".", 1)[-1]


@dataclasses.dataclass(frozen=True)
class Experts:
    """The routed experts of a mixture-of-experts layer, stored as three-dimensional parameters.

    transformers 5 stores all experts of a layer in two tensors that are not `nn.Linear`:
    bitsandbytes does not quantize them, and `all-linear` of PEFT 0.21 wraps each tensor as a unit.
    """

    count: int
    active: int
    """Experts per token."""
    width: int
    exact_routing: bool = False
    """Whether outputs are multiplied by routing weights in fp32, not in the compute data type."""

    def weights(self, hidden: int) -> int:
        """Weights of one expert: gate, up and down."""
        return 3 * hidden * self.width


@dataclasses.dataclass(frozen=True)
class Architecture:
    """Shape of a decoder-only transformer: all that memory, communication and time depend on."""

    kind: str
    """`model_type` of the config."""
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    width: int
    """Inner width of the dense feed-forward layer."""
    vocab: int
    tied: bool
    """Whether the head shares the embedding's weights."""
    matrices: tuple[Matrix, ...]
    """Linear layers of one decoder layer, in the order of the forward pass."""
    experts: Experts | None = None
    gated: bool = True
    """Whether the feed-forward layer multiplies two branches (gate and up)."""
    activation: Activation = "silu"
    norm: Literal["rms", "gemma", "layer"] = "rms"
    norms: int = 2
    """Normalizations of the hidden state in one layer."""
    qk_norm: bool = False
    norms_after: bool = False
    """Whether outputs of branches are normalized, not inputs; query and key over all heads."""
    extra: float = 0.0
    """Bytes per token that a layer saves in addition, measured, if its operations are not known."""
    capped_scores: bool = False
    """Whether the attention scores are soft-capped with a tanh."""
    capped_logits: bool = False
    """Whether the logits are soft-capped with a tanh."""
    positions: int = 0
    """Rows of the learned position embedding; 0 without one."""
    context: int = 0
    """Maximum sequence length of the model."""
    prefix: str = "model.layers"
    table: str = "embed_tokens"
    """Name of the embedding."""
    head: str = "lm_head"
    scores: int = 0
    """Outputs of a score head in place of logits, which is never tied; 0 for a language model."""
    tower: "Tower | None" = None
    """Of a model that reads images; its parameters are none of those counted here."""
    # The part of a model on one process of a mesh: its layers, heads, inner width, vocabulary and
    # experts are counted per process; norms are not divided.
    ways: int = 1
    """Processes that split each matrix."""
    first: bool = True
    """Whether this part has the embedding."""
    last: bool = True
    """Whether this part has the final norm and the head."""
    expert_groups: int = 1
    """Number of groups with different experts among the processes that shard a layer."""

    @property
    def query(self) -> int:
        return self.heads * self.head_dim

    @property
    def key(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def norm_size(self) -> int:
        """Parameters of one normalization of the hidden state."""
        return self.hidden * (2 if self.norm == "layer" else 1)

    @property
    def expert_parameters(self) -> int:
        """Router and experts of one layer."""
        if self.experts is None:
            return 0
        each = self.experts.weights(self.hidden)
        return self.experts.count * (each + self.hidden)

    @functools.cached_property
    def layer_parameters(self) -> int:
        normed = self.query + self.key if self.norms_after else 2 * self.head_dim
        small = self.norms * self.norm_size + normed * self.qk_norm
        return self.expert_parameters + small + sum(m.parameters for m in self.matrices)

    @functools.cached_property
    def linear_weights(self) -> int:
        """Weights of the `nn.Linear` modules of one layer, to which adapters and NF4 apply."""
        return sum(matrix.weights for matrix in self.matrices)

    @property
    def embedding(self) -> int:
        return self.vocab * self.hidden

    @property
    def outputs(self) -> int:
        """Outputs of the head: a logit for each token id, or scores."""
        return self.scores or self.vocab

    @property
    def head_weights(self) -> int:
        """Weights of the head by which a token is multiplied."""
        return self.outputs * self.hidden

    @property
    def tables(self) -> int:
        """Matrices with a row for each token: the embedding, and the head of untied logits."""
        return 1 if self.tied or self.scores else 2

    @property
    def outer_parameters(self) -> int:
        """Parameters outside the layers: embedding, positions, final norm, untied head."""
        found = self.first * (self.embedding + self.positions * self.hidden)
        if not self.last:
            return found
        head = 0 if self.tied else self.head_weights
        return found + self.norm_size + head

    @property
    def held_layer(self) -> int:
        """Parameters of a layer, summed over the processes that shard it."""
        if self.experts is None:
            return self.layer_parameters
        each = self.experts.count * self.experts.weights(self.hidden)
        return self.layer_parameters + (self.expert_groups - 1) * each

    @property
    def parameters(self) -> int:
        return self.layers * self.held_layer + self.outer_parameters

    @property
    def active_parameters(self) -> int:
        """Parameters used for one token: all except the experts it is not routed to."""
        if self.experts is None:
            return self.parameters
        idle = self.experts.count - self.experts.active
        return self.parameters - self.layers * idle * self.experts.weights(self.hidden)

    @property
    def multiplied(self) -> int:
        """Weights by which one token is multiplied: matrices, its experts, and the head."""
        experts = 0
        if self.experts is not None:
            visited = self.experts.active * self.experts.weights(self.hidden)
            experts = visited + self.experts.count * self.hidden
        return self.layers * (self.linear_weights + experts) + self.head_weights


@dataclasses.dataclass(frozen=True)
class Tower:
    """A vision transformer and the connector behind it."""

    shape: Architecture
    """Its layers; the vocabulary has no meaning."""
    embedding: int
    """Parameters of the tower outside of its layers."""
    connector: int
    """Parameters of the connector."""
    patches: int
    """Patches that become one token."""
    pixels: float
    """Bytes of the inputs for one token: pixels, and their mask if there is one."""
    trains: tuple[str, ...]
    """Parts that are trained, as in `model.trains`."""
    windows: bool
    """Whether images attend in separate calls, and their patches are concatenated."""

    @property
    def opened(self) -> bool:
        """Whether the tower is trained, and so has a backward pass."""
        return "tower" in self.trains

    @property
    def inside(self) -> int:
        """Parameters of its layers."""
        return self.shape.layers * self.shape.layer_parameters

    @property
    def trained(self) -> int:
        """Parameters with gradients where there is no adapter."""
        of_tower = (self.inside + self.embedding) * self.opened
        return of_tower + self.connector * ("connector" in self.trains)
