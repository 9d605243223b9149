"""Matrix products of a layer with adapters: one by one as in PEFT, or in groups."""

from finetune.planner.estimate.adapter_sizes import NO_ADAPTER
from finetune.planner.estimate.autograd.tape import Tape, Value, parameter
from finetune.planner.estimate.workload import Workload
from finetune.planner.shapes.architecture import Matrix

GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Adapted matrices that `kernels.lora` computes together."""


class Products:
    """Records the matrix products of a layer on its tape."""

    def __init__(self, tape: Tape, workload: Workload) -> None:
        self.tape, self.workload, self.tokens = tape, workload, workload.tokens
        self.adapter = workload.adapter or NO_ADAPTER
        self.ranks = self.adapter.ranks
        self.matrices = {matrix.leaf: matrix for matrix in workload.shape.matrices}
        self.waiting: dict[str, Value] = {}
        """Products of a group that are computed but not yet used."""

    def linear(self, matrix: Matrix, value: Value) -> Value:
        """A matrix product, with an adapter if the matrix has one."""
        n, tape = self.workload, self.tape
        if n.groups_adapters and matrix.leaf in self.ranks:
            return self._of_group(matrix, value)
        size = self.tokens * matrix.outputs * n.compute
        expanded = 2.0 * matrix.weights if n.dequantizes else 0.0
        given, weight = value, parameter(matrix.weights * n.stored_width, n.trains_all)
        casts = n.autocast and value.size / (self.tokens * matrix.inputs) != n.compute
        if casts:
            given = tape.run(self.tokens * matrix.inputs * n.compute, (value,))
        if n.autocast and n.trains_all and n.stored_width != n.compute:
            weight = tape.run(matrix.weights * n.compute, (weight,))
        keeps = [given] if n.trains_all or n.inputs_kept else []
        if not weight.leaf:
            keeps.append(weight)
        output = tape.run(size, (given, weight), keeps, forward=expanded, backward=expanded)
        rank = self.ranks.get(matrix.leaf, 0)
        return self._adapter(matrix, rank, value, output) if rank else output

    def _adapter(self, matrix: Matrix, rank: int, value: Value, output: Value) -> Value:
        """LoRA: the product with A and B, scaled and added to the output."""
        n, tape = self.workload, self.tape
        given, held = value, [value]
        inner = self.tokens * matrix.inputs
        a = parameter(rank * matrix.inputs * self.adapter.width, True)
        b = parameter(rank * matrix.outputs * self.adapter.width, True)
        # PEFT casts to the adapter's fp32 and autocast casts back; each adapter keeps its own copy.
        if n.autocast and n.widens_inputs and value.size / inner != 4:
            given = tape.run(4 * inner, (value,))
            held.append(given)
        if self.adapter.dropout:
            mask = Value(given.size if n.cpu else inner, grad=False)
            given = tape.run(given.size, (given,), (mask,), backward=given.size)
        if n.autocast and given.size / inner == 4:
            given = tape.run(2 * inner, (given,))
        if n.autocast:
            a = tape.run(a.size / 2, (a,))
            b = tape.run(b.size / 2, (b,))
        norm = self._norm_of_weight(matrix) if self.adapter.dora else None
        low = tape.run(self.tokens * rank * n.compute, (given, a), (given, a))
        high = tape.run(output.size, (low, b), (low, b))
        if norm is not None:
            return self._decomposed(matrix, given, output, high, norm, held)
        scaled = tape.run(output.size, (high,))
        return tape.run(output.size, (output, scaled), passes=True, holds=held)

    def _norm_of_weight(self, matrix: Matrix) -> Value:
        """Memory for the norm of a complete weight in DoRA of PEFT 0.21, held until the layer ends.

        The product of B and A, computed with an identity matrix, and the weight, both in the data
        type of the input. Their sum is computed in two steps and freed after its norm.
        """
        n, weights = self.workload, float(matrix.weights)
        width = 4 if n.autocast and n.widens_inputs else n.compute
        copied = n.dequantizes or n.stored_width != width
        unit = float(n.compute * matrix.inputs**2)
        held = unit + width * weights * (1 + copied)
        return self.tape.run(held, (), forward=2 * width * weights)

    def _decomposed(
        self,
        matrix: Matrix,
        given: Value,
        output: Value,
        high: Value,
        norm: Value,
        held: list[Value],
    ) -> Value:
        """DoRA: the base and adapter products, scaled by magnitude / norm, added to the output.

        The magnitudes are in fp32, and so are their products. With dropout, the base product is
        computed again, from a copy of its weight that the backward pass needs.
        """
        n, tape = self.workload, self.tape
        wide = output.size * (4 / n.compute if n.autocast else 1)
        magnitude = parameter(matrix.outputs * self.adapter.width, True)
        base = output
        if self.adapter.dropout:
            base = tape.run(
                output.size, (given,), (Value(float(n.compute * matrix.weights), False),)
            )
        narrow = wide - output.size
        scaled = tape.run(wide, (base, magnitude), (base,), backward=wide + narrow)
        added = tape.run(wide, (high, magnitude), (high,), backward=wide + narrow)
        added = tape.run(wide, (added,))
        both = tape.run(wide, (scaled, added), passes=True, holds=(norm,))
        total = tape.run(wide, (output, both), passes=True, holds=held)
        return tape.run(output.size, (total,)) if narrow else total

    def _of_group(self, matrix: Matrix, value: Value) -> Value:
        """The product of an adapted matrix; the first of a group computes all of the group."""
        if matrix.leaf not in self.waiting:
            names = next(
                (g for g in GROUPS if g[0] == matrix.leaf and all(n in self.ranks for n in g)),
                (matrix.leaf,),
            )
            made = self._grouped([self.matrices[name] for name in names], value)
            self.waiting.update(zip(names, made, strict=True))
        return self.waiting.pop(matrix.leaf)

    def _grouped(self, matrices: list[Matrix], value: Value) -> tuple[Value, ...]:
        """Adapted products of one input as a single operation (`kernels/lora.py`).

        It saves its input in the compute data type and the product with all A. In the forward pass,
        4-bit weights are dequantized one by one, each before the previous one is freed; in the
        backward pass, one at a time.
        """
        n, tape, tokens = self.workload, self.tape, self.tokens
        inputs, c = matrices[0].inputs, n.compute
        ranks = sum(self.ranks[matrix.leaf] for matrix in matrices)
        sizes = [float(tokens * matrix.outputs * c) for matrix in matrices]
        rows = value
        if value.size != tokens * inputs * c:
            rows = tape.run(tokens * inputs * c, (value,))
        narrow = Value(float(tokens * ranks * c), grad=False)
        downs = float(ranks * inputs * c)
        expanded = [2.0 * m.weights if n.dequantizes else 0.0 for m in matrices]
        forward = [
            downs + sum(expanded[max(0, i - 1) : i + 1]) - sum(sizes[i:])
            for i in range(len(matrices))
        ]
        forward += [downs + expanded[i] - sum(sizes[i + 1 :]) for i in range(len(matrices))]
        parameters = [
            parameter(float(self.ranks[m.leaf] * side * self.adapter.width), True)
            for m in matrices
            for side in (m.inputs, m.outputs)
        ]
        return tape.run_many(
            sizes,
            (rows, *parameters),
            (rows, narrow),
            forward=max(forward),
            backward=narrow.size + downs + max(expanded),
        )
