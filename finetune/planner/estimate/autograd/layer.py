"""The operations of one layer as in transformers 5, with the tensors that autograd saves.

Sizes are bytes for T tokens. Each operation was compared with a FakeTensor trace of the real layers
(torch 2.13, transformers 5.23, peft 0.21); `tests/test_planner_memory.py` checks the totals.
"""

from finetune.planner.estimate.adapter_sizes import NO_ADAPTER
from finetune.planner.estimate.autograd.products import Products
from finetune.planner.estimate.autograd.ring_attention import ring_attention
from finetune.planner.estimate.autograd.tape import Tape, Value, parameter
from finetune.planner.estimate.workload import Workload
from finetune.planner.kernels import score_block


class Layer:
    """Builds the tape of one layer."""

    def __init__(self, workload: Workload) -> None:
        self.workload, self.shape = workload, workload.shape
        self.adapter = workload.adapter or NO_ADAPTER
        self.rows, self.length, self.tokens = workload.rows, workload.length, workload.tokens
        self.tape = Tape()
        self.products = Products(self.tape, workload)

    def build(self, enters: bool = True) -> tuple[Tape, Value, Value]:
        """The tape, the input hidden state and the output hidden state.

        Args:
            enters: whether the input needs a gradient.
        """
        h, n = self.shape.hidden, self.workload
        source = Value(self.tokens * h * n.residual, grad=enters)
        if self.shape.kind == "gpt_neox":
            return self.tape, source, self._parallel(source)
        normed = self._before(source)
        if self.shape.extra:
            kept = Value(self.tokens * self.shape.extra * n.compute / 2, grad=False)
            normed = self.tape.run(normed.size, (normed,), (kept,), passes=True)
        middle = self._residual(source, self._attention(normed), (normed,))
        normed = self._before(middle)
        # The caller's frame keeps the input alive until the layer returns.
        result = self._residual(middle, self._feed_forward(normed), (normed, source))
        return self.tape, source, result

    def _before(self, stream: Value) -> Value:
        """What a branch reads."""
        return stream if self.shape.norms_after else self.norm(stream)

    def _parallel(self, source: Value) -> Value:
        """GPT-NeoX: both branches read the same hidden state."""
        attended = self._attention(self.norm(source))
        widened = self._feed_forward(self.norm(source))
        total = self.tape.run(source.size, (attended, widened), passes=True)
        return self.tape.run(source.size, (total, source), passes=True)

    def _residual(self, stream: Value, branch: Value, holds: tuple[Value, ...]) -> Value:
        if self.shape.norms == 4 or self.shape.norms_after:
            # Gemma 2 and 3 normalize what a branch adds, too, and OLMo 2 only that.
            branch = self.norm(branch)
        return self.tape.run(stream.size, (stream, branch), passes=True, holds=holds)

    def norm(self, value: Value, elements: int = 0) -> Value:
        """A normalization over `elements` per token (by default the hidden size), in fp32."""
        elements = elements or self.shape.hidden
        size = self.tokens * elements
        width = value.size / size
        trained = self.workload.trains_all
        if self.shape.norm == "layer":
            weight = parameter(0, trained)
            return self.tape.run(value.size, (value, weight), (value,))
        if self.workload.compiled:
            width = self.workload.compute if self.workload.autocast else int(width)
            return self.tape.run(width * size, (value, parameter(0, trained)), (value,))
        if self.workload.fused_norms:
            return self._fused_norm(value, size, elements)
        # Llama: x.float(), x * rsqrt(mean(x^2)), cast back, times the weight. Gemma casts last.
        exact = value if width == 4 else self.tape.run(4 * size, (value,))
        rows = 4.0 * size / (elements if elements == self.shape.hidden else self.shape.head_dim)
        squares = self.tape.run(rows, (exact,), (exact,), forward=4 * size, backward=12 * size)
        scaled = self.tape.run(4 * size, (exact, squares), (exact, squares), backward=4 * size)
        # 0 bytes: the weight of a norm is negligible, but it decides what is saved.
        weight = parameter(0, trained)
        if self.shape.norm == "gemma":
            keeps = (scaled,) if trained else ()
            product = self.tape.run(
                4 * size, (scaled, weight), keeps, backward=4 * size if trained else 0
            )
            return product if width == 4 else self.tape.run(width * size, (product,))
        cast = scaled if width == 4 else self.tape.run(width * size, (scaled,))
        keeps = (cast,) if trained else ()
        scratch = width * size if trained else 0
        return self.tape.run(width * size, (cast, weight), keeps, backward=scratch)

    def _fused_norm(self, value: Value, size: float, elements: int) -> Value:
        """One operation that saves its input and one number per row (`kernels/norm.py`).

        The forward pass holds an fp32 copy in addition to the result, and to its rounded copy. The
        backward pass holds fp32 copies of input and gradient and, for the gradient of the weight,
        first their product, which is summed and freed; if the hidden state is fp32, the result is
        one of these copies.
        """
        trained, chained = self.workload.trains_all, self.workload.chained
        narrow = value.size != 4 * size
        heads = elements if elements == self.shape.hidden else self.shape.head_dim
        inverse = Value(4.0 * size / heads, grad=False)
        forward = 4 * size if narrow or self.shape.norm == "rms" else 0.0
        if narrow and self.shape.norm == "rms":
            forward += value.size
        backward = (10 + 2 * trained if narrow else 8) * size
        if chained:  # the gradient of the weight has no C kernel
            forward, backward = 0.0, backward if trained else 0.0
        given = (value, parameter(0, trained))
        return self.tape.run(value.size, given, (value, inverse), forward, backward)

    def _attention(self, value: Value) -> Value:
        names = self.products.matrices
        fused = next((n for n in ("qkv_proj", "query_key_value", "c_attn") if n in names), None)
        if fused is None:
            query, key, values = self._separate(value)
        else:
            query, key, values = self._split(self.products.linear(names[fused], value))
        mixed = self._mix(query, key, values)
        out = next(n for n in ("o_proj", "dense", "c_proj") if n in names)
        # Both output matrices of GPT-2 are named c_proj; the first one is attention's.
        matrix = next(m for m in self.shape.matrices if m.leaf == out)
        return self.products.linear(matrix, mixed)

    def _separate(self, value: Value) -> tuple[Value, Value, Value]:
        """Rotated query and key, and value, from separate products."""
        names, shape = self.products.matrices, self.shape

        def project(name: str, elements: int) -> Value:
            made = self.products.linear(names[name], value)
            return self.norm(made, elements) if shape.qk_norm else made

        if self.workload.fused_rotations:
            query, key = project("q_proj", shape.query), project("k_proj", shape.key)
            values = self.products.linear(names["v_proj"], value)
            query, key = self._rotated_together(query, key)
            return query, key, values
        query = self._rotated(project("q_proj", shape.query))
        key = self._rotated(project("k_proj", shape.key))
        return query, key, self.products.linear(names["v_proj"], value)

    def _split(self, joint: Value) -> tuple[Value, Value, Value]:
        """Query, key and value as views of one product, which stays alive as long as any view.

        Rotation copies query and key.
        """
        # Learned positions (GPT-2): without a rotation nothing copies the views.
        if self.shape.positions:
            return joint, joint, joint
        c = self.workload.compute
        q, k = self.tokens * self.shape.query * c, self.tokens * self.shape.key * c
        query = self.tape.run(q, (joint,), forward=2 * q, backward=2 * q)
        key = self.tape.run(k, (joint,), forward=2 * k, backward=2 * k)
        return query, key, joint

    def _rotated(self, value: Value) -> Value:
        """Rotary embedding: x cos + rotate(x) sin; saves only the tables."""
        size = value.size
        # backward: g cos, g sin, its two halves, each padded to full size, and their sum
        return self.tape.run(size, (value,), forward=3 * size, backward=3 * size)

    def _rotated_together(self, query: Value, key: Value) -> tuple[Value, ...]:
        """Rotary embedding of query and key as one operation (`kernels/rotary.py`).

        If the tables have a wider data type than query and key, input and result are copied in that
        type. Rows share the tables, which are repeated.
        """
        n, sizes = self.workload, (query.size, key.size)
        wider = n.residual / (query.size / (self.tokens * self.shape.query))
        copies = [2 * wider * size if wider > 1 else 0.0 for size in sizes]
        tables = float(self.tokens * self.shape.head_dim * n.residual) * (3 if self.rows > 1 else 1)
        if n.chained:  # tables in fp32, and their repeated copies
            wide = 0 if n.residual == 4 else 8
            repeated = 2 * n.residual if self.rows > 1 else 0
            copies, tables = (
                [0.0, 0.0],
                float(self.tokens * self.shape.head_dim * (wide + repeated)),
            )
        most = max(0.0, copies[0] - sizes[1], copies[1]) + tables
        return self.tape.run_many(sizes, (query, key), (), forward=most, backward=most)

    def _mix(self, query: Value, key: Value, values: Value) -> Value:
        tape, q = self.tape, float(self.tokens * self.shape.query * self.workload.compute)
        statistics = 4.0 * self.tokens * self.shape.heads
        grouped = self.shape.heads != self.shape.kv_heads
        if self.workload.attention == "flash" and self.workload.repeated > 1:
            return self._mix_repeated(query, key, values)
        if self.workload.attention == "flash" and self.workload.layout.axes.ring > 1:
            given = query, key, values
            return ring_attention(tape, self.workload, *given)
        if self.workload.attention == "flash":
            # The logarithm of the sum of powers of each row and head, from which the backward pass
            # computes the probabilities again.
            lse = Value(statistics, grad=False)
            given = (key, values)
            if self.workload.gathered > 1:
                given = (self._gathered(key, values),)
            mixed = self._attend(q, (query, *given), (lse,), self._scores())
            for _ in range(self.workload.rearranged):
                mixed = tape.run(q, (mixed,), keeps_result=True)
            return mixed
        if grouped:  # repeated to all heads
            key = tape.run(q, (key,), backward=0)
            values = tape.run(q, (values,), backward=0)
        if self.workload.attention == "masked":
            lse = Value(statistics, grad=False)
            mask = Value(self.rows * self.length**2 * self.workload.compute, grad=False)
            return self._attend(q, (query, key, values), (lse, mask))
        return self._eager(query, key, values)

    def _mix_repeated(self, query: Value, key: Value, values: Value) -> Value:
        """Flash attention of documents that share prompts, which it repeats in its inputs."""
        tape, n, tokens = self.tape, self.workload, self.tokens * self.workload.repeated
        q, k = (tokens * size * n.compute for size in (self.shape.query, self.shape.key))
        # The gradient of narrow copies is summed in fp32.
        wide = 0.0 if n.compute == 4 else 2 * (1 + 1 / n.repeated)
        given = [
            tape.run(size, (v,), backward=wide * size)
            for size, v in ((q, query), (k, key), (k, values))
        ]
        lse = Value(4.0 * tokens * self.shape.heads, grad=False)
        mixed = self._attend(q, tuple(given), (lse,), self._scores())
        for _ in range(n.rearranged):
            mixed = tape.run(q, (mixed,))
        return tape.run(float(self.tokens * self.shape.query * n.compute), (mixed,))

    def _gathered(self, key: Value, values: Value) -> Value:
        """Keys and values of all tokens of a row, as gathered by `distributed.context`.

        They are concatenated and then put in the order of the tokens. In the backward pass, their
        gradient is reordered before it is summed.
        """
        own = key.size + self.tokens * self.shape.key * self.workload.compute
        beside, whole = self.tape.run(own, (key, values)), own * self.workload.gathered
        return self.tape.run(whole, (beside,), forward=own, backward=whole)

    def _eager(self, query: Value, key: Value, values: Value) -> Value:
        """Eager attention: scores, scaled and masked, softmax in fp32, and the weighted values.

        Softmax casts its input to fp32 and saves its result, in addition to the 16-bit copy that
        multiplies the values; its backward pass holds the result and both gradients, all in fp32.
        GPT-2 does not cast.
        """
        tape, c = self.tape, self.workload.compute
        width = c if self.shape.kind == "gpt2" and not self.workload.autocast else 4
        scores = float(self.rows * self.shape.heads * self.length**2)
        scaled = tape.run(c * scores, (tape.run(c * scores, (query, key), (query, key)),))
        if self.shape.capped_scores:
            scaled = self.capped(scaled)
        masked = tape.run(c * scores, (scaled,), passes=True)
        wide = masked if c == width else tape.run(width * scores, (masked,))
        weights = tape.run(width * scores, (wide,), keeps_result=True)
        if c != width:  # the variable refers to the scores until it is reassigned
            weights = tape.run(c * scores, (weights,), holds=(masked,))
        mixed = float(self.tokens * self.shape.query * c)
        return tape.run(mixed, (weights, values), (weights, values))

    def capped(self, value: Value) -> Value:
        """Soft-capping, cap x tanh(value / cap); saves the tanh."""
        size, tape = value.size, self.tape
        tanh = tape.run(size, (tape.run(size, (value,)),), keeps_result=True)
        return tape.run(size, (tanh,))

    def _scores(self) -> float:
        """Bytes that attention by matrix products holds for one document in its backward pass.

        Two buffers of scores; keys and values of the document, also transposed, with their
        gradients in fp32.
        """
        if not self.workload.scored:
            return 0.0
        shape, length = self.shape, self.workload.scored
        scores = 2 * shape.heads * length * score_block(shape.heads, length)
        each = length * shape.kv_heads * shape.head_dim
        return float(self.workload.compute * (scores + 4 * each) + 4 * 2 * each)

    def _attend(
        self, size: float, inputs: tuple[Value, ...], keeps: tuple[Value, ...], backward: float = 0
    ) -> Value:
        """Attention, which saves its inputs and its output in addition to `keeps`."""
        return self.tape.run(size, inputs, (*inputs, *keeps), backward=backward, keeps_result=True)

    def kept_selectively(self) -> float:
        """Bytes per layer that selective activation checkpointing (per operator) keeps.

        torchtitan's policy: the input, the output and statistics of attention, and every second
        matrix product in execution order.
        """
        saved = sum(matrix.outputs for matrix in self.shape.matrices[::2])
        c = self.workload.compute
        width = self.shape.hidden * self.workload.residual + (saved + self.shape.query) * c
        return self.tokens * (width + 4.0 * self.shape.heads)

    def _feed_forward(self, value: Value) -> Value:
        if self.shape.experts is not None:
            return self._experts(value)
        names = self.products.matrices
        c, f = self.workload.compute, self.shape.width
        size = self.tokens * f * c
        if not self.shape.gated:
            # The shape lists matrices in the order of execution.
            first, second = [m for m in self.shape.matrices if m.name.startswith("mlp.")]
            return self.products.linear(
                second, self._activated(self.products.linear(first, value), size)
            )
        if "gate_up_proj" in names:
            # Gate and up are views of one product: saving either keeps both.
            joint = self.products.linear(names["gate_up_proj"], value)
            active = self.tape.run(size, (joint,), (joint,), backward=size)
            product = self.tape.run(size, (active, joint), (active, joint))
        elif self.workload.compiled or self.workload.fused_activations:
            gate = self.products.linear(names["gate_proj"], value)
            up = self.products.linear(names["up_proj"], value)
            # `kernels/activation.py`: the gradient of act(gate), next to those of gate and up
            scratch = 0.0 if self.workload.compiled or self.workload.chained else size
            product = self.tape.run(size, (gate, up), (gate, up), backward=scratch)
        else:
            gate = self.products.linear(names["gate_proj"], value)
            active = self._activated(gate, size)
            up = self.products.linear(names["up_proj"], value)
            product = self.tape.run(size, (active, up), (active, up))
        return self.products.linear(names["down_proj"], product)

    def _activated(self, value: Value, size: float) -> Value:
        tape = self.tape
        if self.shape.activation != "gelu_new":
            return tape.run(size, (value,), (value,))
        # 0.5 x (1 + tanh(c (x + 0.044715 x^3)))
        half = tape.run(size, (value,))
        cube = tape.run(size, (value,), (value,), backward=3 * size)
        inner = tape.run(size, (tape.run(size, (value, tape.run(size, (cube,)))),))
        tanh = tape.run(size, (inner,), keeps_result=True)
        shifted = tape.run(size, (tanh,), passes=True)
        return tape.run(size, (half, shifted), (half, shifted))

    def _experts(self, value: Value) -> Value:
        """Copies of each token through its experts, then their sum weighted by the router."""
        shape, tape = self.shape, self.tape
        assert shape.experts is not None
        routed = self._routed(value)
        if self.workload.layout.axes.experts > 1:
            return self._dispatched(value, routed)
        chosen, h = self.tokens * shape.experts.active, shape.hidden
        down, copies = self._through_experts(value, chosen)
        # The gradient of the routing weights is a product of this size too.
        # Variables of the layer's forward pass name `held` until it returns.
        inputs, held, size = (down, routed), (value, down, copies), self._routing * chosen * h
        weighted = tape.run(size, inputs, inputs, backward=size)
        in_order = tape.run(size, (weighted,), holds=held)
        return tape.run(value.size, (in_order,), holds=held)

    @property
    def _routing(self) -> int:
        """Bytes per element of products with routing weights."""
        experts = self.shape.experts
        return 4 if experts is not None and experts.exact_routing else self.workload.compute

    def _routed(self, value: Value) -> Value:
        """Routing weights of the chosen experts, with what the router and its sort save.

        Probabilities of all experts in fp32; for each choice four indices of 64 bits: its expert,
        its place in the order of the experts, that of its token, and its way back.
        """
        shape, n, tape = self.shape, self.workload, self.tape
        assert shape.experts is not None
        count, active = self.tokens * shape.experts.count, self.tokens * shape.experts.active
        given = (value, parameter(0, n.trains_all))
        logits = tape.run(count * n.compute, given, (value,) if n.trains_all else ())
        probabilities = tape.run(4.0 * count, (logits,), keeps_result=True)
        indices = Value(4 * 8.0 * active, grad=False)
        return tape.run(4.0 * active, (probabilities,), (indices,))

    def _through_experts(self, value: Value, chosen: float) -> tuple[Value, Value]:
        """Outputs of the experts for `chosen` copies of tokens, and those copies."""
        shape, n, tape = self.shape, self.workload, self.tape
        assert shape.experts is not None
        # Autocast does not cover grouped matrix products, which use the data type of the weights.
        h, f, c = shape.hidden, shape.experts.width, n.stored_width if n.autocast else n.compute
        count = shape.experts.count
        outer = self._expert_weight(count, 2 * f, h, 2)
        inner = self._expert_weight(count, h, f, 1)
        copies = tape.run(chosen * h * c, (value,), backward=4 * chosen * h)
        trained = (copies,) if n.trains_all or self.adapter.experts else ()
        joint = tape.run(2 * chosen * f * c, (copies, outer), (*trained, outer))
        # Two views, whose gradients are joined only when both exist.
        gate, up = tape.halves(joint)
        active = tape.run(chosen * f * c, (gate,), (joint,), holds=(joint,))
        product = tape.run(chosen * f * c, (active, up), (active, joint), holds=(joint,))
        trained = (product,) if n.trains_all or self.adapter.experts else ()
        return tape.run(chosen * h * c, (product, inner), (*trained, inner)), copies

    def _dispatched(self, value: Value, routed: Value) -> Value:
        """Experts on other processes, to which tokens are sent and from which they return.

        As in transformers 5.23. With balanced routing, a process receives as many tokens as it
        sends. Each tensor parallel process sends its share. At the mark, the gradients of the
        experts are reduced.
        """
        shape, n, tape = self.shape, self.workload, self.tape
        assert shape.experts is not None
        tape.mark()
        chosen = self.tokens * shape.experts.active / shape.ways
        size = chosen * shape.hidden * n.residual
        received = tape.run(size, (tape.run(size, (value,), holds=(value,)),), holds=(value,))
        down, copies = self._through_experts(received, chosen)
        held = (value, received, copies, down)
        weighted = tape.run(size, (down,), holds=held)
        in_order = tape.run(size, (weighted,), holds=held)
        returned = tape.run(size, (in_order,), holds=(value,))
        # Variables of the caller name these until the result has been made.
        held = (value, received, in_order, returned)
        own = tape.run(size, (returned,), holds=held)
        # Products in the data type of the routing weights, and as large ones for the gradients.
        inputs, wide = (own, routed), self._routing * chosen * shape.hidden
        casts = wide > size
        weighted = tape.run(wide, inputs, inputs, backward=(1 + casts) * wide)
        # Summed over experts, then cast; the gradient of a sum is a view of that of its result.
        total = wide / shape.experts.active
        weighted.gradient = total
        more = total - value.size if casts else 0.0
        return tape.run(value.size, (weighted,), forward=more, passes=not casts, holds=held)

    def _expert_weight(self, count: int, outputs: int, inputs: int, fused: int) -> Value:
        """Weights of all experts, with the product of their adapters added if they have any."""
        n = self.workload
        size = count * outputs * inputs * n.stored_width
        if not self.adapter.experts:
            return parameter(size, n.trains_all)
        rank = count * fused * self.adapter.experts
        a = parameter(rank * inputs * self.adapter.width, True)
        b = parameter(rank * outputs * self.adapter.width, True)
        return self.tape.run(size, (a, b))
