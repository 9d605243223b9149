"""Weights that are gathered whole for a moment of a step, under FSDP and ZeRO-3."""

from finetune.planner.estimate.workload import Workload

# DeepSpeed 0.19's default: parameters that ZeRO-3 may hold gathered. It releases none that are used
# again before so many others were: those of which half as many lie between them and the loss.
LIVE_PARAMETERS = 1_000_000_000


class Gathered:
    """Bytes of gathered weights, by the moment."""

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
        """Embedding or head, gathered whole."""
        return float(self.workload.shape.embedding * self.workload.outer_width)

    @property
    def _everything(self) -> float:
        """All weights, gathered whole."""
        return self._layers * self.workload.unit_bytes + self.workload.outer_bytes

    def at_head(self) -> float:
        """Weights gathered while the loss runs backwards."""
        workload = self.workload
        if not self._gathers:
            return 0.0
        if self._stays_gathered:
            return self._everything
        if not self.fsdp:
            return max(self._table, self._reused())
        held = workload.outer_bytes if workload.root_unit else self._table
        return held + self.ahead

    @property
    def ahead(self) -> float:
        """The last layer's weights, gathered in advance of its backward pass."""
        return float(self.workload.unit_bytes)

    @property
    def frees_head(self) -> bool:
        """Whether the head is a unit that is freed once it has run backwards."""
        apart = self.fsdp and not (self.workload.root_unit or self.workload.shape.tied)
        return self._gathers and apart and not self._stays_gathered

    def at_loss(self) -> float:
        """Weights gathered while the loss is computed.

        In the forward pass FSDP2 frees the buffer of a gathering with the next one: of the last
        there are two copies. Tied, the head came first, and the last is a layer.
        """
        workload = self.workload
        if not self.fsdp:
            return self.at_head()
        if self._stays_gathered:
            units = self._everything
        else:
            units = workload.outer_bytes if workload.root_unit else self._table
        if workload.root_unit:
            # Nothing is gathered after the last layer: the buffer of its gathering stays.
            return units + workload.unit_bytes
        return units + (workload.unit_bytes if workload.shape.tied else self._table)

    def arriving(self) -> float:
        """Weights gathered while those of the head are copied out of their buffer.

        The buffer of the last layer is freed after that only.
        """
        apart = self.fsdp and not (self.workload.root_unit or self.workload.shape.tied)
        return self.at_loss() + (self.workload.unit_bytes if apart else 0.0)

    @property
    def _gathers(self) -> bool:
        """Whether weights come from elsewhere, processes or the host, when they are needed."""
        layout = self.workload.layout
        streams = layout.group > 1 or layout.offload == "all"
        return streams and (layout.traits.shards_all or layout.shard == "params")

    @property
    def _stays_gathered(self) -> bool:
        """Whether FSDP keeps units from the forward to the backward pass."""
        return self.workload.layout.traits.shards_all and self.workload.layout.shard == "grads"

    def forward(self) -> float:
        """Weights gathered while the last layer runs forwards: its own in two copies."""
        if not (self._gathers and self._stays_gathered):
            return self.backward(0)
        return (self._layers + 1) * self.workload.unit_bytes + self._table

    def backward(self, index: int) -> float:
        """Weights gathered while a layer runs backwards: its own, and the next one's in advance.

        Before the first layer the embedding comes next. What stayed gathered goes layer by layer.
        """
        workload = self.workload
        layout = workload.layout
        if not self._gathers:
            return 0.0
        apart = self.fsdp and not workload.root_unit
        if self._stays_gathered:
            outer = self._table if apart else workload.outer_bytes
            return (self._layers - index) * workload.unit_bytes + outer
        if apart and not workload.shape.tied and index and index == self._layers - 1:
            return workload.unit_bytes + self._table
        outer = workload.outer_bytes if layout.traits.shards_all and workload.root_unit else 0.0
        if apart and workload.shape.tied:
            outer = self._table  # one unit with the head, which stays from forward to backward
        ahead = min(2, self._layers) * workload.unit_bytes
        if layout.traits.shards_all:
            return outer + ahead
        return max(min(ahead, 2.0 * LIVE_PARAMETERS), self._reused() - index * workload.unit_bytes)

    def _reused(self) -> float:
        """Weights that ZeRO-3 keeps from the forward to the backward pass: the last ones."""
        if not self.workload.layout.traits.keeps_reused:
            return 0.0
        return min(self._everything, 2.0 * LIVE_PARAMETERS / 2)

    def at_embedding(self) -> float:
        """Weights gathered while the embedding runs backwards."""
        workload = self.workload
        if self.fsdp and not workload.root_unit:
            return self._table if workload.shape.tied else 2 * self._table
        return self.at_head() if not workload.root_unit else self.at_loss()
