"""The optimizer does what the recipe says, step by step; each micro-batch has a mask of its own."""

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import (
    Finetune,
    Runs,
    Tiny,
    Train,
    apart,
    cut_off,
    launch,
    losses,
    problems_of,
    slow,
    slow_but,
    together,
    write_recipe,
)
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import finetune as ft
from finetune import catalog
from finetune.cache import cache
from finetune.data.chat.render import load_chat
from finetune.data.prepare import prepare
from finetune.data.rows.collate import collate
from finetune.data.rows.order import rows_of_step
from finetune.distributed.adafactor import Adafactor
from finetune.distributed.averages import result
from finetune.distributed.muon import Muon
from finetune.distributed.reader import Reader
from finetune.models.model import load_tokenizer
from finetune.planner.estimate.workload import adam_moments
from finetune.recipe import Optim
from finetune.runs.run import Run
from finetune.training.narrow_adamw import AdamW4bit, AdamW8bit, table_of
from finetune.training.optim import Lion, build, check, group_notes, groups_of, learning_rate
from finetune.training.run_options import Options
from finetune.training.schedule_free import ScheduleFreeAdamW

FREE = {"name": "schedule_free_adamw", "schedule": "constant", "lr": 1e-2}
HAND = {
    "lr": 1e-2, "warmup": 2, "min_lr": 0.1, "betas": [0.8, 0.9], "eps": 1e-3,
    "weight_decay": 0.5, "max_grad_norm": 0.5,
}  # fmt: skip
"""Values that are not the defaults; `eps` is near the moments, so that it counts."""
RATES = [
    0.005,
    0.01,
    0.01,
    *(0.001 + 0.009 * (1 + math.cos(math.pi * n / 4)) / 2 for n in (1, 2, 3)),
]


def of(schedule: str, **arguments: Any) -> dict[str, Any]:
    return {"schedule": schedule, "schedule_arguments": arguments}


@pytest.mark.parametrize(
    ("optim", "expected"),
    [
        ({"schedule": "cosine"}, [1, (2 + math.sqrt(2)) / 4, 0.5, 0]),
        ({"schedule": "cosine", "min_lr": 0.2}, [1, 0.2 + 0.2 * (2 + math.sqrt(2)), 0.6, 0.2]),
        (of("cosine", num_cycles=1), [1, 0.5, 0, 1]),
        ({"schedule": "linear"}, [1, 0.75, 0.5, 0]),
        ({"schedule": "linear", "min_lr": 0.2}, [1, 0.8, 0.6, 0.2]),
        ({"schedule": "constant", "min_lr": 0.2}, [1, 1, 1, 1]),
        (of("cosine_with_restarts", num_cycles=2), [1, 0.5, 1, 0]),
        (of("cosine_with_min_lr", min_lr_rate=0.2), [1, 0.2 + 0.2 * (2 + math.sqrt(2)), 0.6, 0.2]),
        (of("polynomial", power=2, lr_end=0), [1, 0.75**2, 0.5**2, 0]),
        (of("inverse_sqrt", timescale=10), [1, 1 / math.sqrt(2), 1 / math.sqrt(3), 5**-0.5]),
        (of("warmup_stable_decay", num_decay_steps=20), [1, 1, 1, 0]),
    ],
)
def test_the_rate_at_the_quarters_of_a_run(optim: dict[str, Any], expected: list[float]) -> None:
    rates = [learning_rate(step, 40, Optim(warmup=0, **optim), 3.0) for step in (0, 10, 20, 40)]
    assert rates == pytest.approx([3 * each for each in expected], abs=1e-12)


@pytest.mark.parametrize(
    ("optim", "problem"),
    [
        (of("linear", num_cycles=2), "argument 'num_cycles'; it takes none"),
        (of("polynomial", lr_end=1), "it takes lr_end, power"),
    ],
)
def test_a_schedule_refuses_arguments_that_it_does_not_take(
    optim: dict[str, Any], problem: str
) -> None:
    assert problems_of(learning_rate, 5, 6, Optim(**optim), 0.1)[0].endswith(problem)


def test_a_constant_rate_takes_no_arguments() -> None:
    with pytest.raises(ft.FinetuneError, match="constant takes none"):
        Optim(**of("constant", num_cycles=2))


@pytest.mark.parametrize("warmup", [0.1, 4])
def test_warmup_is_a_share_of_the_run_or_steps(warmup: float) -> None:
    optim = Optim(schedule="linear", warmup=warmup)
    rates = [learning_rate(step, 40, optim, 1.0) for step in (0, 1, 3, 4, 22)]
    assert rates == pytest.approx([0.25, 0.5, 1, 1, 0.5])


def test_six_steps_are_those_of_adamw_by_hand(train: Train, tiny: Tiny) -> None:
    """In fp32, where a sum in another order moves the seventh digit of a gradient."""
    run = train(optim=HAND, saving={"every": 3})
    steps = list(run.read_metrics("train"))
    model, wanted = by_hand(run, tiny)
    assert [step["lr"] for step in steps] == pytest.approx(RATES, rel=1e-12)
    norms = [step["grad_norm"] for step in steps]
    assert max(norms) > 2 * HAND["max_grad_norm"]  # some are clipped by a half
    assert [step["loss"] for step in steps] == pytest.approx([w[0] for w in wanted], rel=1e-5)
    assert norms == pytest.approx([w[1] for w in wanted], rel=1e-4)
    found = load_file(run.checkpoint(6) / "model" / "model.safetensors")
    for name, parameter in model.named_parameters():
        # A thousandth of the distance that the rate lets a weight go in a step.
        torch.testing.assert_close(found[name], parameter.data, atol=1e-5, rtol=0, msg=name)


def by_hand(run: Run, tiny: Tiny) -> tuple[torch.nn.Module, list[tuple[float, float]]]:
    """The model after the steps, each step's loss and the norm of its gradient."""
    recipe = catalog.load(run.recipe)
    rows = prepare(recipe, load_chat(load_tokenizer(recipe), None), cache("data")).train
    model = AutoModelForCausalLM.from_pretrained(tiny.model, dtype=torch.float32)
    moments = {name: [torch.zeros_like(p)] * 2 for name, p in model.named_parameters()}
    found, (b1, b2) = [], HAND["betas"]
    for number, lr in enumerate(RATES, 1):
        batch = collate(rows, rows_of_step(number - 1, len(rows), 8, recipe.seed), 0, "cpu")
        loss = model(batch.ids, attention_mask=batch.attention_mask, labels=batch.labels).loss
        model.zero_grad()
        loss.backward()
        norm = math.sqrt(sum(float(p.grad.square().sum()) for p in model.parameters()))
        clip = min(1.0, HAND["max_grad_norm"] / norm)
        for name, p in model.named_parameters():
            first, second = moments[name]
            first = b1 * first + (1 - b1) * clip * p.grad
            second = b2 * second + (1 - b2) * (clip * p.grad) ** 2
            moments[name] = [first, second]
            decay = HAND["weight_decay"] if p.dim() == 2 else 0.0  # norms are vectors
            root = (second / (1 - b2**number)).sqrt() + HAND["eps"]
            p.data -= lr * decay * p.data + lr * first / (1 - b1**number) / root
        found.append((loss.item(), norm))
    return model, found


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_matrices_alone_are_decayed_and_muon_has_only_those_inside_blocks(name: str) -> None:
    config = LlamaConfig(
        hidden_size=8, intermediate_size=12, num_hidden_layers=1, num_attention_heads=2,
        vocab_size=16, tie_word_embeddings=False, attention_bias=True,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    vectors = {each for each in names.values() if each.endswith(("bias", "norm.weight"))}
    outside = {"model.embed_tokens.weight", "lm_head.weight"}
    blocks = set(names.values()) - vectors - outside
    assert len(vectors) == 3 + 4
    optim = Optim(name=name, weight_decay=0.3, betas=(0.5, 0.6), eps=1e-4)
    found = {
        (type(optimizer).__name__, group["weight_decay"]): {names[id(p)] for p in group["params"]}
        for optimizer in build(model, optim, 1e-3)
        for group in optimizer.param_groups
    }
    if name == "adamw":
        assert found == {("AdamW", 0.3): blocks | outside, ("AdamW", 0.0): vectors}
    else:
        assert found == {("Muon", 0.3): blocks, ("AdamW", 0.3): outside, ("AdamW", 0.0): vectors}


@pytest.fixture(scope="module")
def dropping(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, Any]]:
    """Fields of a recipe whose rows are all the same, and whose weights stay where they are.

    The losses of two micro-batches then differ only by what attention drops.
    """
    folder = tmp_path_factory.mktemp("same")
    row = tiny.data.read_text().splitlines()[0]
    (folder / "same.jsonl").write_text(f"{row}\n" * 48)
    model = AutoModelForCausalLM.from_pretrained(tiny.model, attention_dropout=0.5)
    # Random weights of this size hardly attend to anything: larger ones let a mask be seen.
    for name, parameter in model.named_parameters():
        parameter.data *= 10 if "_proj" in name else 1
    model.save_pretrained(folder / "model")
    load_tokenizer(catalog.from_fields(tiny.fields())).save_pretrained(folder / "model")

    def fields(rows: int, **sections: Any) -> dict[str, Any]:
        return tiny.fields(
            model={"name": str(folder / "model")},
            data=[{"source": str(folder / "same.jsonl"), "format": "messages"}],
            batch={"rows": rows, "micro_rows": 1},
            optim={"lr": 1e-12, "weight_decay": 0.0},
            data_checks="report",
            **sections,
        )

    return fields


Fields = Callable[..., dict[str, Any]]


@pytest.fixture
def masked(dropping: Fields, runs_of: Runs) -> dict[str, Run]:
    """Runs whose steps have a row, two rows, and a row with another seed."""
    recipes = {"one": dropping(1), "two": dropping(2), "seed": dropping(1, seed=1)}
    return runs_of("single", recipes)


def test_each_micro_batch_step_and_rank_has_a_mask_of_its_own(dropping, masked, run_of):
    one, two, seed = map(losses, masked.values())
    assert len({*one, *seed}) == 12
    # The first micro-batch is that of a step of one row: the mean tells the loss of the second.
    seconds = [2 * both - first for first, both in zip(one, two, strict=True)]
    assert min(abs(a - b) for a in seconds for b in one) > 1e-4
    spread = losses(run_of("ddp", fields=dropping(2)))
    assert spread == pytest.approx(two, abs=2e-6)  # the second is that of rank 1


def test_a_resumed_run_draws_the_masks_that_it_would_have_drawn(dropping, masked, train, tmp_path):
    cut_off(masked["two"], tmp_path / "cut", 3)
    resumed = train("cut", fields=dropping(2), resume=True)
    assert losses(resumed) == losses(masked["two"])


def test_an_evaluation_drops_nothing(masked: dict[str, Run]) -> None:
    """Equal rows and weights that stay: each evaluation is that of training without dropping."""
    first, second = losses(masked["one"], "eval")
    assert first == second


@pytest.mark.parametrize("name", ["sgd", "lion", "torch.optim:RMSprop", "torch.optim:Adamax"])
def test_optimizers_that_update_each_element_by_itself_may_be_sharded(name: str) -> None:
    check(Optim(name=name), sharded=True)


class ScheduleFree(torch.optim.SGD):
    """Has the methods of the optimizers of schedulefree."""

    def eval(self) -> None:
        """Move the weights to those of evaluation."""


@pytest.mark.parametrize(
    ("optim", "sharded", "problem"),
    [
        ({"name": "torch.optim:Muon"}, True, "does not update each element by itself"),
        ({"name": "torch.optim:Adafactor"}, True, "does not update each element by itself"),
        ({"name": "bitsandbytes.optim:AdamW8bit"}, True, "does not update each element by itself"),
        ({"name": "test_optim:ScheduleFree"}, False, "has other weights for evaluation"),
        ({"name": "torch.optim:LBFGS"}, False, "cannot take a step from gradients alone"),
        ({"name": "torch.optim:SparseAdam"}, False, "cannot take a step from gradients alone"),
        ({"name": "torch.nn:Linear"}, False, "is not a torch.optim.Optimizer"),
        ({"name": "torch.optim:Adamm"}, False, "did you mean 'Adam'?"),
        ({"name": "sgd", "arguments": {"momentun": 1}}, False, "keyword argument 'momentun'"),
        ({"name": "sgd", "arguments": {"lr": 1}}, False, "lr=1: write it as optim.lr"),
        (
            {"name": "lion", "arguments": {"weight_decay": 1}},
            False,
            "write it as optim.weight_decay",
        ),
    ],
)
def test_an_optimizer_that_cannot_be_used_is_refused_before_a_model_is_loaded(
    optim: dict[str, Any], sharded: bool, problem: str
) -> None:
    assert problem in problems_of(check, Optim(**optim), sharded)[0]


def test_lion_is_that_of_its_paper() -> None:
    weight = torch.nn.Parameter(torch.tensor([0.3, -0.2, 0.5]))
    made, by_hand, moment = Lion([weight], 0.1, (0.5, 0.9), 0.2), weight.detach().clone(), 0.0
    for step in (1.0, -3.0, 0.5):
        weight.grad = torch.tensor([step, 1.0, -step])
        made.step()
        by_hand -= 0.1 * ((0.5 * moment + 0.5 * weight.grad).sign() + 0.2 * by_hand)
        moment = 0.9 * moment + 0.1 * weight.grad
    torch.testing.assert_close(weight.detach(), by_hand)


def test_schedule_free_steps_are_those_of_the_paper() -> None:
    """Algorithm 1 of arXiv:2405.15682, with x stored, in double precision."""
    given = {"betas": (0.8, 0.9), "eps": 1e-3, "weight_decay": 0.2}
    weight = torch.nn.Parameter(torch.tensor([0.3, -0.2, 0.5], dtype=torch.float64))
    made, total, moment = ScheduleFreeAdamW([weight], **given), 0.0, 0.0
    x = z = weight.detach().clone()
    for step, lr in enumerate((0.05, 0.1, 0.1), 1):
        gradient = torch.tensor([step, 1.0, -0.1 * step]).double()
        y = 0.2 * z + 0.8 * x
        moment = 0.9 * moment + 0.1 * gradient**2
        root = (moment / (1 - 0.9**step)).sqrt() + 1e-3
        z = z - lr * (gradient / root + 0.2 * y)
        total += lr**2
        x = x + lr**2 / total * (z - x)
        weight.grad, made.param_groups[0]["lr"] = gradient, lr
        made.step()
    state, near = made.state[weight], {"rtol": 1e-6, "atol": 0}  # the sum of squares is in fp32
    torch.testing.assert_close(state["z"], z, **near)
    torch.testing.assert_close(weight.detach(), 0.2 * z + 0.8 * x, **near)
    optim = Optim("schedule_free_adamw", schedule="constant", betas=(0.8, 0.9))
    torch.testing.assert_close(result(weight.detach(), state, optim), x, **near)


@pytest.mark.parametrize(
    ("optim", "adapter"), [(FREE, None), ({"ema_decay": 0.6}, {"r": 4})], ids=["free", "average"]
)
def test_an_average_is_evaluated_and_saved_and_the_weights_of_the_training_go_on(
    optim: dict[str, Any], adapter: dict[str, Any] | None, train: Train, tiny: Tiny
) -> None:
    saving = {"every": 1, "keep": 4}
    sections = {"optim": optim, "adapter": adapter, "saving": saving, "max_steps": 4}
    run = train("often", **sections, evaluation={"every": 1})
    assert losses(run) == losses(train("once", **sections, evaluation={"every": 100}))
    recipe = catalog.load(run.recipe)
    rows = prepare(recipe, load_chat(load_tokenizer(recipe), None), cache("data")).eval
    batch = collate(rows, range(len(rows)), 0, "cpu")
    averages: dict[str, torch.Tensor] = {}
    for step, found in enumerate(losses(run, "eval"), 1):
        folder = run.checkpoint(step)
        with Reader(folder) as reader:
            for name in reader.shapes:
                weight = reader.full(name, "weight")
                if optim is FREE:
                    averages[name] = (weight - 0.1 * reader.full(name, "z")) / 0.9
                else:
                    averages[name] = 0.6 * averages.get(name, weight) + 0.4 * weight
        kind = "adapter/adapter_model" if adapter else "model/model"
        saved = load_file(folder / f"{kind}.safetensors")
        for name, values in saved.items():
            known = averages[name.replace(".weight", ".default.weight") if adapter else name]
            torch.testing.assert_close(values.reshape(-1), known, atol=1e-6, rtol=1e-5)
        model = AutoModelForCausalLM.from_pretrained(
            tiny.model if adapter else folder / "model", dtype=torch.float32
        )
        model = PeftModel.from_pretrained(model, folder / "adapter") if adapter else model
        given = {"attention_mask": batch.attention_mask, "labels": batch.labels}
        with torch.no_grad():
            assert float(model(batch.ids, **given).loss) == pytest.approx(found, abs=2e-6)


def test_the_maps_are_those_of_bitsandbytes() -> None:
    from bitsandbytes.functional import create_dynamic_map

    for signed in (True, False):
        values = table_of(signed, 7, torch.device("cpu")).values
        assert torch.equal(values, create_dynamic_map(signed=signed))


@pytest.mark.parametrize("kind", [*AdamW8bit.maps.values(), *AdamW4bit.maps.values()])
def test_a_code_is_that_of_the_nearest_value(kind) -> None:
    table = table_of(*kind, torch.device("cpu"))
    middles = (table.values[1:] + table.values[:-1]) / 2
    if kind == (False, 7):
        middles[0] = -1  # a second moment is never rounded to 0
    one = torch.tensor(1.0)
    near = [middles, middles.nextafter(one), middles.nextafter(-one), table.values, one[None]]
    shares = torch.cat([*near, torch.linspace(-1 if kind[0] else 0, 1, 2**18)]).clamp(-1, 1)
    assert torch.equal(table.encode(shares).int(), torch.bucketize(shares, middles).int())


def steps_of(rule: Any, start: torch.Tensor, cut: int = 1, **given: Any) -> torch.Tensor:
    """A parameter after four steps with gradients that differ in size by column."""
    parts = [torch.nn.Parameter(part.clone()) for part in start.split(len(start) // cut)]
    made = rule(parts, lr=0.01, **given)
    rng = torch.Generator().manual_seed(3)
    for _ in range(4):
        gradient = torch.randn(start.shape, generator=rng)
        gradient *= torch.linspace(0.01, 1, start.shape[-1])
        for part, grad in zip(parts, gradient.split(len(parts[0])), strict=True):
            part.grad = grad.clone()
        made.step()
    return torch.cat([part.detach() for part in parts])


START = torch.linspace(-1, 1, 64 * 512).view(64, 512)


def test_eight_bits_are_as_near_to_adamw_as_those_of_bitsandbytes() -> None:
    from bitsandbytes.optim import AdamW8bit as Theirs

    exact, ours, theirs = (
        steps_of(rule, START, weight_decay=0.1) for rule in (torch.optim.AdamW, AdamW8bit, Theirs)
    )
    moved = (exact - START).norm()
    assert (ours - theirs).norm() < 0.01 * moved
    assert (ours - exact).norm() < (theirs - exact).norm() < 0.05 * moved
    in_four_bits = steps_of(AdamW4bit, START, weight_decay=0.1)
    assert (in_four_bits - exact).norm() < 0.25 * moved


def test_a_small_tensor_has_the_moments_of_adamw() -> None:
    start = START[:4]
    exact = steps_of(torch.optim.AdamW, start, weight_decay=0.1, foreach=False)
    torch.testing.assert_close(steps_of(AdamW8bit, start, weight_decay=0.1), exact, atol=0, rtol=0)


@pytest.mark.parametrize(("rule", "size"), [(AdamW8bit, 2.03125), (AdamW4bit, 1.0625)])
def test_narrow_moments_do_not_depend_on_the_cut_and_have_the_planned_size(rule, size) -> None:
    """Halves of a tensor as on two processes, of 16,384 elements each, so that both have codes."""
    assert torch.equal(steps_of(rule, START, cut=2), steps_of(rule, START))
    weight = torch.nn.Parameter(START.clone())
    made, weight.grad = rule([weight]), START
    made.step()
    tensors = [each for each in made.state[weight].values() if isinstance(each, torch.Tensor)]
    assert sum(each.nbytes for each in tensors) / START.numel() == size
    assert adam_moments(1 if rule is AdamW8bit else 0.5, True) == size


@pytest.mark.parametrize("start", [START, START[:1], START[:, :1], START[3]])
def test_adafactor_is_that_of_torch(start: torch.Tensor) -> None:
    """But for the seventh digit; a matrix of one row is a vector, whose moments are the same."""
    given = {"weight_decay": 0.1}
    wanted = steps_of(torch.optim.Adafactor, start, **given)
    found = steps_of(Adafactor, start, **given)
    assert (found - wanted).norm() < 5e-6 * (wanted - start).norm()


def test_muon_is_that_of_torch() -> None:
    """Bit for bit where it iterates in bf16; an expert of a stack is a matrix of its own."""
    given = {"weight_decay": 0.1}
    wanted = steps_of(torch.optim.Muon, START, adjust_lr_fn="match_rms_adamw", **given)
    assert torch.equal(steps_of(Muon, START, dtype=torch.bfloat16, **given), wanted)
    near = (steps_of(Muon, START, **given) - wanted).norm()
    assert near < 0.02 * (wanted - START).norm()  # bf16 has eight bits
    stack = torch.nn.Parameter(torch.stack([START, 2 * START]))
    alone = torch.nn.Parameter(START.clone())
    stack.grad, alone.grad = torch.stack([START.cos(), START.sin()]), START.cos()
    for parameter in (stack, alone):
        Muon([parameter], 0.1).step()
    assert torch.equal(stack[0], alone)


SHARDED = """
import json, torch, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from finetune.distributed.adafactor import Adafactor
from finetune.distributed.muon import Muon
from finetune.distributed.parameters import local
from finetune.training.narrow_adamw import AdamW4bit, AdamW8bit
from finetune.training.schedule_free import ScheduleFreeAdamW

SHAPES = (130, 64), (1, 64), (33, 16, 32), (64, 192), (7, 5)
dist.init_process_group("gloo")


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.weights = nn.ParameterList(torch.randn(shape) for shape in SHAPES)

    def forward(self, x):
        return sum((weight * x).square().sum() for weight in self.weights)


def trained(mesh, rule):
    network = Network() if mesh is None else fully_shard(Network(), mesh=mesh)
    made = rule(list(network.parameters()))
    for step in range(4):
        network(torch.tensor(1.0 + step)).backward()
        made.step()
        made.zero_grad()
    held = [v for state in made.state.values() for v in state.values() if torch.is_tensor(v)]
    weights = [p.detach() for p in network.parameters()]
    full = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in weights]
    return full, sum(local(each).nbytes for each in held)


meshes = {"fsdp": init_device_mesh("cpu", (4,))}
meshes["hsdp"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
rules = {"8": AdamW8bit, "4": AdamW4bit, "free": ScheduleFreeAdamW}
rules["adafactor"] = lambda given: Adafactor(given, 0.1, weight_decay=0.1)
for dtype in (torch.float32, torch.bfloat16):
    rules[f"muon {dtype}"] = lambda given, dtype=dtype: Muon(given, 0.1, dtype=dtype)
different = []
for name, rule in rules.items():
    wanted, size = trained(None, rule)
    for kind, mesh in meshes.items():
        found, part = trained(mesh, rule)
        same = all(map(torch.equal, found, wanted))
        if name == "adafactor":  # sums over rows have another order, and columns are on each rank
            same = all(map(torch.allclose, found, wanted))
            part /= mesh.size(-1)
        if not same or part * mesh.size(-1) > 1.1 * size:  # 130 and 33 rows are cut unevenly
            different.append((name, kind, same, part, size))
if dist.get_rank() == 0:
    print(different)
"""


def test_steps_on_four_processes_are_those_of_one_bit_for_bit(tmp_path: Path) -> None:
    """With rows that four does not divide, an empty part, and experts; powers of two average."""
    assert together(SHARDED, 4, tmp_path).output.splitlines()[-1] == "[]"


ENGINES = "zero1", "zero2_offload", "zero3", "ddp", "tp", "pp"


def test_the_first_group_that_matches_counts_and_vectors_are_not_decayed() -> None:
    optim = Optim(
        lr=1e-3, weight_decay=0.5, loraplus_lr_ratio=16,
        groups=[
            {"match": "embed|norm", "lr": 1e-5, "weight_decay": 0.1},
            {"match": "head|embed", "lr": 1e-4},
        ],
    )  # fmt: skip
    shapes = {
        "embed.weight": (4, 2), "norm.weight": (2,), "lm_head.weight": (4, 2),
        "q.lora_A.weight": (1, 2), "q.lora_B.weight": (2, 1),
    }  # fmt: skip
    named = {name: torch.nn.Parameter(torch.zeros(shape)) for name, shape in shapes.items()}
    names = {id(parameter): name.split(".weight")[0] for name, parameter in named.items()}
    assert {
        (each["weight_decay"], round(each["lr_share"], 9)): [names[id(p)] for p in each["params"]]
        for each in groups_of(named.items(), optim)
    } == {
        (0.1, 0.01): ["embed"], (0.0, 0.01): ["norm"], (0.5, 0.1): ["lm_head"],
        (0.5, 1.0): ["q.lora_A"], (0.5, 16.0): ["q.lora_B"],
    }  # fmt: skip
    assert group_notes(shapes, optim) == [
        "optim: 'embed|norm' has 10 parameters in 2 tensors, lr 1e-05",
        "optim: 'head|embed' has 8 parameters in 1 tensors, lr 0.0001",
        "optim: 'lora_B' has 2 parameters in 1 tensors, lr 0.016",
    ]


def test_a_group_without_parameters_is_refused(train: Train) -> None:
    groups = [{"match": "mlp"}, {"match": "down_proj", "lr": 1e-3}]
    with pytest.raises(ft.FinetuneError, match="'down_proj' matches no trained parameter"):
        train(optim={"groups": groups})


def test_groups_that_freeze_everything_are_refused() -> None:
    shapes = {"lm_head.weight": (4, 2), "norm.weight": (2,)}
    optim = Optim(groups=[{"match": "head", "lr": 0}, {"match": "", "lr": 0}])
    (problem,) = problems_of(group_notes, shapes, optim)
    assert problem == "optim.groups: each parameter has lr 0, so nothing is trained; raise one"


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_arguments_reach_every_optimizer_or_are_refused(name: str) -> None:
    config = LlamaConfig(
        hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, vocab_size=8
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    (problem,) = problems_of(build, model, Optim(name=name, arguments={"momentun": 0.5}), 0.1)
    assert "'momentun'; it takes " in problem
    if name == "muon":
        first, _ = build(model, Optim(name=name, arguments={"momentum": 0.5}), 0.1)
        assert first.param_groups[0]["momentum"] == 0.5


@pytest.mark.parametrize("backend", ["single", slow("fsdp_full_shard")])
def test_a_group_with_a_rate_of_zero_stays(backend: str, run_of: Train, tiny: Tiny) -> None:
    groups = [{"match": "lm_head|embed", "lr": 0}]
    run = run_of(backend, optim={"groups": groups}, max_steps=2)
    before, after = (load_file(each / "model.safetensors") for each in (tiny.model, run.final))
    same = {name for name, value in before.items() if torch.equal(value, after[name])}
    assert same == {"model.embed_tokens.weight", "lm_head.weight"}


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw_8bit": {"name": "adamw_8bit", "lr": 1e-2},
    "muon": {
        "name": "muon", "lr": 1e-2, "groups": [{"match": "down_proj", "lr": 3e-2}],
        "ema_decay": 0.6,
    },
    "lion": {"name": "lion", "lr": 1e-3, "betas": [0.9, 0.99], "weight_decay": 0.1},
    "sgd": {"name": "sgd", "lr": 0.5, "arguments": {"momentum": 0.9}},
    "adamax": {"name": "torch.optim:Adamax", "lr": 1e-2, "schedule": "polynomial"},
    "adamw_4bit": {"name": "adamw_4bit", "lr": 1e-2},
    "free": FREE,
    "adafactor": {"name": "adafactor", "lr": 1e-2},
}  # fmt: skip
OFTEN = ("adamw_8bit", "muon")
HALVES: dict[str, Any] = {"saving": {"every": 0.5, "keep": 3}, "evaluation": {"every": 0.5}}


@pytest.mark.parametrize("name", slow_but(OFTEN, OPTIMIZERS))
def test_an_optimizer_shards_and_resumes_on_one_process(
    name: str, tiny: Tiny, runs_of: Runs, tmp_path: Path
) -> None:
    """Three of six steps on two FSDP processes, the others on one, equal six on one.

    A gradient that is summed in another order may get another code: a small part of a step.
    """
    recipes = recipes_of(tiny, [key for key in OPTIMIZERS if (key in OFTEN) == (name in OFTEN)])
    one, two = (runs_of(each, recipes)[name] for each in ("single", "fsdp_full_shard"))
    goes_on(one, two, tmp_path)
    if name == "muon":
        assert_moved_alike(tiny, one, two)


def recipes_of(tiny: Tiny, names: Iterable[str]) -> dict[str, dict[str, Any]]:
    return {name: tiny.fields(optim=OPTIMIZERS[name], **HALVES) for name in names}


def assert_moved_alike(tiny: Tiny, one: Run, two: Run) -> None:
    """Weights differ by less than a ten-thousandth of their movement."""
    start, wanted, found = (
        load_file(folder / "model.safetensors") for folder in (tiny.model, one.final, two.final)
    )
    for name, before in start.items():
        moved = (wanted[name] - before).norm()
        assert (found[name] - wanted[name]).norm() < 1e-4 * moved, name


ELEMENTS = ("free", "sgd", "adamax", "muon")
"""States of one tensor, of one that the first step makes, of two, and of optimizers and an average
beside one another."""


@pytest.mark.slow
@pytest.mark.parametrize("backend", ENGINES)
@pytest.mark.parametrize("name", ELEMENTS)
def test_any_state_of_elements_is_saved_by_every_engine(
    name: str, backend: str, tiny: Tiny, runs_of: Runs, tmp_path: Path
) -> None:
    recipes = recipes_of(tiny, ELEMENTS)
    one, several = (runs_of(each, recipes)[name] for each in ("single", backend))
    goes_on(one, several, tmp_path)
    if name == "muon":
        assert_moved_alike(tiny, one, several)


ROWS = {
    "pp": ("adafactor",),
    "tp": ("adamw_4bit", "adamw_8bit"),
    "ddp": ("adamw_4bit", "adafactor"),
}


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "name"), [(key, name) for key in ROWS for name in ROWS[key]])
def test_state_of_rows_is_saved_where_a_model_is_divided_or_copied(
    backend: str, name: str, tiny: Tiny, runs_of: Runs, tmp_path: Path
) -> None:
    """With rows that two processes divide into whole blocks."""
    config = LlamaConfig(
        hidden_size=512, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=512, tie_word_embeddings=False,
    ).to_diff_dict()  # fmt: skip
    model = {"name": None, "config": config, "tokenizer": str(tiny.model)}

    def recipes(names: Iterable[str]) -> dict[str, dict[str, Any]]:
        return {
            each: tiny.fields(
                optim={"name": each, "lr": 1e-3}, batch={"micro_rows": 4}, model=model, **HALVES
            )
            for each in names
        }

    one = runs_of("single", recipes(dict.fromkeys(sum(ROWS.values(), ()))))[name]
    goes_on(one, runs_of(backend, recipes(ROWS[backend]))[name], tmp_path)


@pytest.mark.parametrize(
    ("before", "after", "others"),
    [("fsdp_full_shard", "zero2", OFTEN), slow("zero3", "zero1", ELEMENTS)],
)
def test_muon_goes_on_where_matrices_are_cut_otherwise(
    before: str, after: str, others: tuple[str, ...], tiny: Tiny, runs_of: Runs,
    finetune: Finetune, tmp_path: Path,
) -> None:  # fmt: skip
    """Its momentum is read as elements; an average of the weights is, too."""
    recipes = recipes_of(tiny, others)
    one, first = (runs_of(each, recipes)["muon"] for each in ("single", before))
    cut = cut_off(first, tmp_path / "cut", 3)
    launch(finetune, cut.recipe, after, cut.root, "--resume")
    assert apart(one, cut) < 1e-5
    assert apart(one, cut, "eval") < 1e-5


def test_a_cut_inside_of_a_block_is_refused_before_a_step(
    tiny: Tiny, finetune: Finetune, tmp_path: Path
) -> None:
    """The rows of `o_proj` have 64 elements, a block, and each process has 32 of them."""
    recipe = write_recipe(tmp_path / "r.json", tiny.fields(optim={"name": "adamw_8bit"}))
    words = ("--backend", "tp", "--processes", "2", "--output", tmp_path / "run")
    output = finetune("launch", recipe, *words).refused()
    assert "tensor parallelism cuts (64, 64) into (64, 32), inside of a block" in output


def goes_on(one: Run, several: Run, tmp_path: Path) -> None:
    """A run of several processes that ends after half of its steps is continued by one."""
    cut = cut_off(several, tmp_path / "cut", 3)
    options = Options(cut.root, resume=True, plot=False)
    ft.train(catalog.load(cut.recipe), "single", "fp32", options=options)
    assert one.steps() == [3, 6]
    assert apart(one, cut) < 1e-5
    assert apart(one, cut, "eval") < 1e-5


def test_a_state_of_bitsandbytes_continues_in_our_own_codes() -> None:
    """As a checkpoint of an earlier version holds it: the next steps are as near as ever."""
    from bitsandbytes.optim import AdamW8bit as Theirs

    weights = [torch.nn.Parameter(START.clone()) for _ in range(2)]
    theirs, ours, rng = Theirs(weights[:1]), AdamW8bit(weights[1:]), torch.Generator()
    for step in range(6):
        if step == 3:
            weights[1].data.copy_(weights[0].data)
            ours.state[weights[1]] = dict(theirs.state[weights[0]])
            ours.take_over(weights[1], ours.state[weights[1]])
            before = weights[1].detach().clone()
        for weight in weights:
            weight.grad = torch.randn(START.shape, generator=rng.manual_seed(step))
        theirs.step()
        ours.step()
    assert ours.state[weights[1]].keys() == {
        "step", "exp_avg", "exp_avg_scale", "exp_avg_sq", "exp_avg_sq_scale"
    }  # fmt: skip
    first, second = (each.detach() - before for each in weights)
    assert (second - first).norm() < 0.02 * first.norm()


def test_a_plateau_lowers_the_rate_from_the_evaluations_and_a_resumed_run_knows_it(
    train: Train,
) -> None:
    """A loss that never falls by half lowers the rate at the third and fifth evaluation."""
    arguments = {"factor": 0.5, "patience": 1, "threshold": 0.5}
    given = {
        "optim": of("reduce_lr_on_plateau", **arguments) | {"warmup": 0}, "evaluation": {"every": 1}
    }  # fmt: skip
    rates = [step["lr"] for step in train("straight", **given).read_metrics("train")]
    assert rates == pytest.approx([1e-3] * 3 + [5e-4] * 2 + [2.5e-4])
    train("cut", **given, max_steps=4)
    resumed = train("cut", **given, resume=True)
    assert [step["lr"] for step in resumed.read_metrics("train")] == rates
    with pytest.raises(ft.FinetuneError, match=r"optim\.schedule_arguments: .* 'factr'"):
        train("wrong", optim=of("reduce_lr_on_plateau", factr=0.5), evaluation={"every": 1})


@pytest.mark.parametrize("adapter", [None, {"r": 4}], ids=["all", "adapter"])
def test_the_mean_of_the_newest_checkpoints_is_published(adapter: Any, train: Train) -> None:
    saving = {"every": 2, "keep": 3, "average": 3}
    run = train(adapter=adapter, saving=saving, evaluation={"every": 2})
    name = "adapter_model" if adapter else "model"
    folder = "adapter" if adapter else "model"
    parts = [load_file(run.checkpoint(step) / folder / f"{name}.safetensors") for step in (2, 4, 6)]
    found = load_file(run.final / f"{name}.safetensors")
    assert found.keys() == parts[0].keys()
    for key, value in found.items():
        mean = sum(part[key].double() for part in parts) / 3
        torch.testing.assert_close(value, mean.float(), atol=0, rtol=0)
    card = (run.final / "README.md").read_text()
    assert "The weights are the mean of those of steps 2, 4, 6.\n" in card
