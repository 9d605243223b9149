"""Contenders of this repository: the toolkit, and the matrix products that any toolkit needs.

`our_start` runs them.
"""

import contextlib
import dataclasses
import datetime
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.peers.turns import Turns
from benchmarks.peers.workload import CONFIG, UNTRAINED, Job, Row, of_step, read_job, read_rows
from finetune import SFT, Data, Model
from finetune.data.rows.order import permutation
from finetune.data.rows.store import Documents, Rows
from finetune.distributed.base import Engine
from finetune.distributed.build import build
from finetune.kernels import pointwise
from finetune.kernels.cpu import pool
from finetune.models import model
from finetune.models.packed_attention import layout
from finetune.planner import plan
from finetune.training import optim
from finetune.training.loop import feeding, train_step

PADDING = 0
"""A token id that does not occur in rows."""


def packs(rows: list[Row], size: int, seed: int) -> Rows:
    """One pack per step, arranged so that the toolkit's shuffle yields the steps in order."""
    ids = np.concatenate([np.array(ids, dtype=np.int32) for ids, _ in rows])
    trained = np.concatenate([np.array(labels) != UNTRAINED for _, labels in rows])
    offsets = np.cumsum([0, *(len(ids) for ids, _ in rows)])
    documents = Documents(ids, trained, offsets, np.zeros((len(rows), 2), dtype=np.int64))
    count = len(rows) // size
    step_of = np.argsort(permutation(count, seed, 0))  # pack -> the step that takes it
    members = np.concatenate([step * size + np.arange(size) for step in step_of])
    return Rows(documents, members, np.arange(count + 1) * size, packed=True)


def singles(rows: list[Row], seed: int) -> Rows:
    """Unpacked rows, arranged so that the toolkit's shuffle yields the steps in order."""
    made = packs(rows, 1, seed)
    return Rows(made.documents, made.members, made.bounds, packed=False)


def ours_shipped(job: Job, place: Path, turns: Turns) -> None:
    """The toolkit with all defaults of a recipe, except the rows of a step."""
    with nothing_compiled():
        compile_code(job)
        rows = read_rows(place)
        recipe = recipe_of(job, place, job.workload.method).with_batch(
            rows=job.rows, micro_rows=job.micro_rows, max_length=max(len(ids) for ids, _ in rows)
        )
        network, engine = built(recipe, place)
        free = layout(recipe, network.config).free
        laid = dataclasses.replace(singles(rows, recipe.seed), padding_free=free)
        steps(engine, laid, job, turns)


def ours(job: Job, place: Path, turns: Turns) -> None:
    """The toolkit's training loop with default kernels and packing, without cached code."""
    with nothing_compiled():
        compile_code(job)
        train(job, place, turns, job.workload.method)


def ours_lora(job: Job, place: Path, turns: Turns) -> None:
    """The same as `ours` with LoRA on a base in bf16, regardless of the job's method."""
    with nothing_compiled():
        compile_code(job)
        train(job, place, turns, "lora")


def ours_malloc(job: Job, place: Path, turns: Turns) -> None:
    """The same as `ours` without the memory pool."""
    with nothing_compiled():
        pointwise.compile_chains(True)
        train(job, place, turns, job.workload.method)


def ours_eager(job: Job, place: Path, turns: Turns) -> None:
    """The same as `ours` without compilation, as in a run of few tokens."""
    train(job, place, turns, job.workload.method)


def compile_code(job: Job) -> None:
    """Enable compilation and, on CPUs, the memory pool, as in a run of many tokens."""
    pointwise.compile_chains(True)
    if not job.gpu:
        pool.use_pool(True)


@contextlib.contextmanager
def nothing_compiled() -> Iterator[None]:
    """Context manager with empty caches for compiled code."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"FINETUNE_CACHE": folder, "TORCHINDUCTOR_CACHE_DIR": folder}
        yield


def train(job: Job, place: Path, turns: Turns, method: str) -> None:
    """Train on one pack per step."""
    recipe = recipe_of(job, place, method).with_batch(
        rows=1, micro_rows=1, max_length=16384, packing=True
    )
    _, engine = built(recipe, place)
    steps(engine, packs(read_rows(place), job.rows, recipe.seed), job, turns)


def recipe_of(job: Job, place: Path, method: str) -> SFT:
    recipe = (
        SFT(Model(str(place / "model")), data=(Data(str(place / "rows.json"), "text"),))
        .with_optim(lr=job.lr, schedule="constant", warmup=0)
        .with_steps(job.steps)
    )
    if method == "full":
        return recipe
    adapted = recipe.with_lora if method == "lora" else recipe.with_qlora
    return adapted(r=job.r, alpha=job.alpha)


def built(recipe: SFT, place: Path) -> tuple[torch.nn.Module, Engine]:
    """The network of a recipe, and the engine that was prepared with it."""
    settled = plan(recipe, "single", 1, "bf16")
    engine = build(settled, place / "offload", datetime.timedelta(minutes=5))
    network = model.build(engine, recipe.seed)
    engine.prepare(network, optim.build(network, recipe.optim, settled.lr, engine.device))
    return network, engine


def steps(engine: Engine, rows: Rows, job: Job, turns: Turns) -> None:
    turns.watch(engine.model, read)
    turns.ready()
    with feeding(engine, rows, PADDING, job.steps) as feed:
        for step in range(job.steps):
            turns.wait()
            turns.answer(train_step(engine, feed, step, job.steps).loss)
    turns.wait()


def read(
    input_ids: torch.Tensor,
    position_ids: torch.Tensor,
    places: torch.Tensor,
    targets: torch.Tensor,
    **_: Any,  # boundaries for the kernels
) -> dict[str, Any]:
    """Inputs with labels as in other toolkits: the target of a position is the next label."""
    labels = torch.full_like(input_ids, UNTRAINED)
    labels[0, places + 1] = targets
    real = slice(int((input_ids != PADDING).sum()))  # packs are padded at the end
    read = {"ids": input_ids, "labels": labels, "positions": position_ids}
    return {name: each[:, real] for name, each in read.items()}


def products(job: Job, place: Path, turns: Turns) -> None:
    """Only the matrix products of each step in bf16, with its shapes: a lower bound of the time."""
    rows = read_rows(place)
    steps = [of_step(rows, step, job.rows) for step in range(job.steps)]
    if not job.gpu:
        pool.use_pool(True)  # page faults would be included otherwise
    floor = Floor(max(sum(len(ids) for ids, _ in step) for step in steps), job)
    turns.ready()
    for step in steps:
        turns.wait()
        floor.multiply(step)
        turns.answer(None)
    turns.wait()


def linears() -> list[tuple[int, int]]:
    """Shapes (out, in) of the linear layers of one block."""
    width, inner = CONFIG["hidden_size"], CONFIG["intermediate_size"]
    shared = width // CONFIG["num_attention_heads"] * CONFIG["num_key_value_heads"]
    attention = [(width, width), (shared, width), (shared, width), (width, width)]
    return [*attention, (inner, width), (inner, width), (width, inner)]


class Floor:
    """Random operands, and the matrix products of a step on them; results are discarded."""

    def __init__(self, tokens: int, job: Job) -> None:
        self.made = {"dtype": torch.bfloat16, "device": torch.device("cuda" if job.gpu else "cpu")}
        width, words = CONFIG["hidden_size"], CONFIG["vocab_size"]
        self.r, self.heads = job.r, CONFIG["num_attention_heads"]
        self.full = job.workload.method == "full"
        self.frozen = {shape: self.draw(*shape) for shape in set(linears())}
        self.low = {size: self.draw(size, self.r) for shape in self.frozen for size in shape}
        sizes = {size for shape in self.frozen for size in shape} | {self.r}
        self.rows = {size: self.draw(tokens, size) for size in sizes}
        self.head = self.draw(words, width)
        self.scores = self.draw(tokens, words)
        self.queries = self.draw(self.heads, tokens, width // self.heads)

    def draw(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape).to(**self.made)

    def multiply(self, rows: list[Row]) -> None:
        """Forward and backward pass of a step.

        Layers have two products each (the output, the gradient of the input), trained ones a
        third, adapters three of A and of B, attention two forward and five backward, the head two
        over labeled rows, or three.
        """
        lengths = [len(ids) for ids, _ in rows]
        for _ in range(CONFIG["num_hidden_layers"]):
            for shape in linears():
                self._layer(shape, sum(lengths))
            for length in lengths:
                self._attend(length)
        labelled = sum(sum(label != UNTRAINED for label in labels) for _, labels in rows)
        self.rows[CONFIG["hidden_size"]][:labelled] @ self.head.T
        self.scores[:labelled] @ self.head
        if self.full:
            self.scores[:labelled].T @ self.rows[CONFIG["hidden_size"]][:labelled]

    def _layer(self, shape: tuple[int, int], tokens: int) -> None:
        grad, given = (self.rows[size][:tokens] for size in shape)  # of the output; the input
        low, (b, a) = self.rows[self.r][:tokens], (self.low[size] for size in shape)
        given @ self.frozen[shape].T
        grad @ self.frozen[shape]
        if self.full:
            grad.T @ given
            return
        given @ a
        low @ a.T
        low.T @ given  # the gradient of A
        low @ b.T
        grad @ b
        grad.T @ low  # the gradient of B

    def _attend(self, length: int) -> None:
        """Attention of one document; each query uses half of the keys, as with a causal mask."""
        queries, keys = self.queries[:, :length], self.queries[:, : -(-length // 2)]
        for _ in range(3):  # scores forward, again backward, and the gradient of the weights
            weights = queries @ keys.transpose(1, 2)
        for _ in range(2):  # the output, and the gradient of the queries
            weights @ keys
        for _ in range(2):  # the gradients of keys and values
            weights.transpose(1, 2) @ queries


CONTENDERS: dict[str, Callable[[Job, Path, Turns], None]] = {
    "ours": ours,
    "ours_shipped": ours_shipped,
    "ours_malloc": ours_malloc,
    "ours_eager": ours_eager,
    "ours_lora": ours_lora,
    "products": products,
}


def main(name: str, place: Path) -> None:
    turns = Turns()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    CONTENDERS[name](read_job(place), place, turns)
