"""Recomputed activations give the same gradients, and hold what they say."""

import copy

import pytest
from families import adapt, build, gradients, inputs, whole_distance
from torch.utils._python_dispatch import TorchDispatchMode

from finetune import Model, backend
from finetune.kernels.lora import group_adapters
from finetune.methods.sft import SFT
from finetune.models.model import recompute
from finetune.planner.request import requested
from finetune.planner.rules import incompatibilities


class Calls(TorchDispatchMode):
    """Counts forward passes of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func)
        self.attention += "_scaled_dot_product" in name and "backward" not in name
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("grouped", [False, True], ids=["separate", "grouped"])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "mistral"])
@pytest.mark.parametrize(("keep", "passes"), [(True, 1), (False, 2)])
def test_attention_runs_once_where_it_is_kept(kind, grouped, keep, passes):
    plain = adapt(build(kind))
    given = copy.deepcopy(plain)
    if grouped:
        group_adapters(given)
    recompute(given.get_base_model(), "attention" if keep else True)
    given.train()
    plain(**inputs()).loss.backward()
    with Calls() as calls:
        given(**inputs()).loss.backward()
    assert calls.attention == passes * 2  # layers
    # Sums in another order than PEFT's where adapters are grouped.
    assert whole_distance(gradients(given), gradients(plain)) < 2e-6


def test_without_an_accelerator_inputs_are_already_on_the_host() -> None:
    plain = adapt(build("llama"))
    given = copy.deepcopy(plain)
    recompute(given.get_base_model(), "offload")
    for model in (plain, given):
        model.train()
        model(**inputs()).loss.backward()
    assert whole_distance(gradients(given), gradients(plain)) < 2e-6


def test_the_field_takes_true_false_and_two_words() -> None:
    fields = (False, True, "attention", "offload")
    found = [Model("m", activation_checkpointing=field).checkpointing for field in fields]
    assert found == ["none", "full", "attention", "full"]


@pytest.mark.parametrize("attention", ["eager", "flex_attention"])
def test_an_attention_of_many_operations_cannot_be_kept(attention: str) -> None:
    recipe = SFT(Model("m", attention=attention, activation_checkpointing="attention"))
    problems = incompatibilities(requested(recipe, backend.load("single"), 1))
    assert any(problem.startswith("model.activation_checkpointing:") for problem in problems)
