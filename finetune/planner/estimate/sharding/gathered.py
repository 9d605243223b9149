"""Weights that are gathered during a step under FSDP and ZeRO-3."""

from finetune.planner.estimate.workload import Workload

# DeepSpeed 0.19's default: parameters that ZeRO-3 may hold gathered. It does not release parameters
# that are used again before this many others: those at most half as many away from the loss.
LIVE_PARAMETERS = 1_000_000_000


class Gathered:
    """Bytes of gathered weights, for each moment of a step."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload

    @property
    def fsdp(self) -> bool:
        """Whether FSDP shards over several processes."""
        return self.workload.layout.traits.shards_all and self.workload.layout.group > 1

    @property
    def _layers(self) -> int:
        return self.workload.shape.layers

    @property
    def _table(self) -> float:
        """Bytes of the gathered embedding or head."""
        return float(self.workload.shape.embedding * self.workload.outer_width)

    @property
    def _head(self) -> float:
        """Bytes of the gathered head."""
        return float(self.workload.shape.head_weights * self.workload.outer_width)

    @property
    def apart(self) -> bool:
        """Whether FSDP gathers embedding and head as two units."""
        return self.fsdp and not (self.workload.root_unit or self._one_table)

    @property
    def _one_table(self) -> bool:
        """Whether embedding and head are one tensor."""
        return self.workload.shape.tied and not self.workload.shape.scores

    @property
    def _everything(self) -> float:
        """Bytes of all weights, gathered."""
        return self._layers * self.workload.unit_bytes + self.workload.outer_bytes

    def at_head(self) -> float:
        """Weights gathered during the backward pass of the loss."""
        workload = self.workload
        if not self._gathers:
            return 0.0
        if self._stays_gathered:
            return self._everything
        if not self.fsdp:
            return max(self._table, self._reused())
        held = workload.outer_bytes if workload.root_unit else self._head
        return held + self.ahead

    @property
    def ahead(self) -> float:
        """Weights of a layer, prefetched for its backward pass, before those of divided experts."""
        return float(self.workload.unit_bytes) - self._experts

    @property
    def _experts(self) -> float:
        """Bytes of a layer's gathered experts if they are a separate unit."""
        return self.workload.divided_experts * self.workload.frozen_width

    @property
    def _buffer(self) -> float:
        """Bytes of the buffer from which a layer's experts are copied, if they are gathered."""
        return self._experts if self.workload.layout.expert_shards > 1 else 0.0

    def experts_arriving(self) -> float:
        """Weights gathered while those of divided experts are copied out of their buffer."""
        return self.workload.outer_bytes + self.workload.unit_bytes + self._buffer

    @property
    def frees_head(self) -> bool:
        """Whether the head is a separate unit that is freed after its backward pass."""
        return self._gathers and self.apart and not self._stays_gathered

    def at_loss(self) -> float:
        """Weights gathered while the loss is computed.

        In the forward pass, FSDP2 frees the buffer of an all-gather at the next all-gather, so the
        last unit exists twice. That is the head, or the last layer if the head is tied or a score
        head, which is gathered with the outermost module.
        """
        workload = self.workload
        if not self.fsdp:
            return self.at_head()
        if self._stays_gathered:
            units = self._everything
        else:
            units = workload.outer_bytes if workload.root_unit else self._head
        if workload.root_unit:
            # Nothing is gathered after the last layer, so the buffer of its all-gather stays.
            return units + (self._buffer if self._experts else workload.unit_bytes)
        return units + (self._table if self._gathers_head else workload.unit_bytes)

    def arriving(self) -> float:
        """Weights gathered while those of the head are copied out of their buffer.

        The buffer of the last layer is freed only afterwards.
        """
        return self.at_loss() + (self.workload.unit_bytes if self._gathers_head else 0.0)

    @property
    def _gathers_head(self) -> bool:
        """Whether FSDP gathers the head after the last layer."""
        return self.apart and not self.workload.shape.scores

    @property
    def _gathers(self) -> bool:
        """Whether weights are fetched from other processes or the host when they are needed."""
        layout = self.workload.layout
        streams = layout.group > 1 or layout.offload == "all"
        return streams and (layout.traits.shards_all or layout.shard == "params")

    @property
    def _stays_gathered(self) -> bool:
        """Whether FSDP keeps units gathered from the forward to the backward pass."""
        return self.workload.layout.traits.shards_all and self.workload.layout.shard == "grads"

    def forward(self) -> float:
        """Weights gathered during the forward pass of the last layer, which exists twice."""
        if self._gathers and self._experts:
            return self.experts_arriving()
        if not (self._gathers and self._stays_gathered):
            return self.backward(0)
        return (self._layers + 1) * self.workload.unit_bytes + self._table

    def backward(self, index: int) -> float:
        """Weights gathered during the backward pass of a layer: its own, and the prefetched next.

        At the first layer, the next unit is the embedding. Units that stayed gathered are freed
        layer by layer.
        """
        workload = self.workload
        layout = workload.layout
        if not self._gathers:
            return 0.0
        apart = self.fsdp and not workload.root_unit
        if self._stays_gathered:
            outer = self._table if apart else workload.outer_bytes
            return (self._layers - index) * workload.unit_bytes + outer
        if self.apart and index and index == self._layers - 1:
            return workload.unit_bytes + self._table
        outer = workload.outer_bytes if layout.traits.shards_all and workload.root_unit else 0.0
        if apart and self._one_table:
            outer = self._table  # one unit with the head, which stays from forward to backward
        last = index == self._layers - 1 and workload.root_unit
        ahead = workload.unit_bytes + (self.ahead if self._layers > 1 and not last else 0.0)
        if layout.traits.shards_all:
            return outer + ahead
        return max(min(ahead, 2.0 * LIVE_PARAMETERS), self._reused() - index * workload.unit_bytes)

    def _reused(self) -> float:
        """Weights that ZeRO-3 keeps gathered from the forward to the backward pass (the last)."""
        if not self.workload.layout.traits.keeps_reused:
            return 0.0
        return min(self._everything, 2.0 * LIVE_PARAMETERS / 2)

    def at_embedding(self) -> float:
        """Weights gathered during the backward pass of the embedding.

        A frozen one has none unless checkpoints need the gradient of their input; FSDP2 prefetches
        its weights all the same.
        """
        workload = self.workload
        if self.fsdp and not workload.root_unit:
            if self._one_table:
                return self._table
            enters = workload.trains("embedding") or workload.checkpointing == "full"
            return 2 * self._table if enters else self.backward(self._layers - 1)
        if workload.root_unit and not self._experts:
            return self.at_loss()
        return self.at_head()
