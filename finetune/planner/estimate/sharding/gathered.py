"""Weights that are gathered during a step under FSDP and ZeRO-3."""

from finetune.planner.estimate.workload import Workload

# DeepSpeed 0.19's default: parameters that ZeRO-3 may hold gathered. It does not release parameters
# that are used again before this many others: those at most half as many away from the loss.
LIVE_PARAMETERS = 1_000_000_000


class Gathered:
    """Bytes of gathered weights, for each moment of a step."""

    def __init__(self, workload: Workload) -> None:
        self.workload, shape, layout = workload, workload.shape, workload.layout
        self.layers, unit = shape.layers, float(workload.unit_bytes)
        self.fsdp = layout.traits.shards_all and layout.group > 1
        """Whether FSDP shards over several processes."""
        self.one_table = shape.tied
        """Whether embedding and head are one tensor."""
        self.apart = self.fsdp and not (workload.root_unit or self.one_table)
        """Whether FSDP gathers embedding and head as two units."""
        self.gathers_head = self.apart and not shape.scores
        """Whether FSDP gathers the head after the last layer."""
        streams = layout.group > 1 or layout.offload == "all"
        self.gathers = streams and (layout.traits.shards_all or layout.shard == "params")
        """Whether weights are fetched from other processes or the host when they are needed."""
        self.stays_gathered = layout.traits.shards_all and layout.shard == "grads"
        """Whether FSDP keeps units gathered from the forward to the backward pass."""
        self.frees_head = self.gathers and self.apart and not self.stays_gathered
        """Whether the head is a separate unit that is freed after its backward pass."""
        # Bytes of gathered weights: of the embedding, the head, and the whole model.
        self.table = float(shape.embedding * workload.outer_width)
        self.head = float(shape.head_weights * workload.outer_width)
        self.everything = self.layers * workload.unit_bytes + workload.outer_bytes
        self.experts = workload.divided_experts * workload.compute
        """Bytes of a layer's gathered experts if they are a separate unit."""
        self.buffer = self.experts if layout.expert_shards > 1 else 0.0
        """Bytes of the buffer from which a layer's experts are copied, if they are gathered."""
        self.ahead = unit - self.experts
        """Weights of a layer, prefetched for its backward pass, before those of its experts."""
        # Gathered by FSDP from the first forward to the last backward pass; `held`: with the head.
        self.always = workload.outer_bytes * (layout.traits.shards_all and workload.root_unit)
        if self.fsdp and self.one_table and not workload.root_unit:
            self.always = self.table
        self.held = self.head if self.apart else self.always
        # Weights that ZeRO-3 keeps gathered from the forward to the backward pass (the last).
        reused = min(self.everything, 2.0 * LIVE_PARAMETERS / 2)
        self.reused = reused if layout.traits.keeps_reused else 0.0

    def at_head(self) -> float:
        """Weights gathered during the backward pass of the loss."""
        if not self.gathers:
            return 0.0
        if self.stays_gathered:
            return self.everything
        return self.held + self.ahead if self.fsdp else max(self.table, self.reused)

    def experts_arriving(self) -> float:
        """Weights gathered while those of divided experts are copied out of their buffer."""
        return self.workload.outer_bytes + self.workload.unit_bytes + self.buffer

    def at_loss(self) -> float:
        """Weights gathered while the loss is computed.

        In the forward pass, FSDP2 frees the buffer of an all-gather at the next all-gather, so the
        last unit exists twice. That is the head, or the last layer if the head is tied or a score
        head, which is gathered with the outermost module.
        """
        if not self.fsdp:
            return self.at_head()
        last = self.buffer if self.experts else self.workload.unit_bytes
        held = self.everything if self.stays_gathered else self.held
        return held + (self.table if self.gathers_head else last)

    def arriving(self) -> float:
        """Weights gathered while those of the head are copied out of their buffer.

        The buffer of the last layer is freed only afterwards.
        """
        return self.at_loss() + (self.workload.unit_bytes if self.gathers_head else 0.0)

    def entering(self) -> float:
        """Weights gathered while those of embedding or first layer are copied out of their buffer.

        The buffer of the unit before a layer is freed only afterwards: of the root unit, or of an
        embedding of its own, which is itself freed after its forward pass.
        """
        before = self.table if self.apart else self.always
        stays = self.stays_gathered or not self.apart
        return before + max(before, stays * before + 2 * self.ahead)

    def forward(self) -> float:
        """Weights gathered during the forward pass of the last layer, which exists twice."""
        if self.gathers and self.experts:
            return self.experts_arriving()
        if not (self.gathers and self.stays_gathered):
            return self.backward(0)
        return (self.layers + 1) * self.workload.unit_bytes + self.table

    def backward(self, index: int) -> float:
        """Weights gathered during the backward pass of a layer: its own, and the prefetched next.

        At the first layer, the next unit is the embedding, if it is not gathered with the head.
        Units that stayed gathered are freed layer by layer.
        """
        unit, last = self.workload.unit_bytes, index == self.layers - 1
        if not self.gathers:
            return 0.0
        if self.stays_gathered:
            root = self.workload.root_unit or not self.fsdp
            outer = self.workload.outer_bytes if root else self.table
            return (self.layers - index) * unit + outer
        if self.apart and index and last:
            return unit + self.table
        ends = self.layers == 1 or (last and self.fsdp and not self.apart)
        ahead = unit if ends else unit + self.ahead
        if self.workload.layout.traits.shards_all:
            return self.always + ahead
        return max(min(ahead, 2.0 * LIVE_PARAMETERS), self.reused - index * unit)

    def at_embedding(self) -> float:
        """Weights gathered during the backward pass of the embedding.

        A frozen one has none unless checkpoints need the gradient of their input; FSDP2 prefetches
        its weights all the same.
        """
        workload = self.workload
        if self.fsdp and not workload.root_unit:
            if self.one_table:
                return self.table
            enters = workload.trains("embedding") or workload.checkpointing == "full"
            return 2 * self.table if enters else self.backward(self.layers - 1)
        if workload.root_unit and not self.experts:
            return self.at_loss()
        return self.at_head()
