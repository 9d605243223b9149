"""Where weights are loaded to, on a machine where PyTorch seems to have a GPU."""

import torch

from finetune import catalog
from finetune.distributed.fsdp import Fsdp
from finetune.kernels.quantised import Params4bit
from finetune.models.network import compute_dtype, pretrained
from finetune.planner import plan


def test_fsdp_quantizes_on_the_host(tiny, monkeypatch):
    """By default, transformers would load all weights to the GPU, which is not there."""
    model = {"name": str(tiny.model), "quantization": "nf4"}
    recipe = catalog.from_fields(tiny.fields(model=model, adapter={"r": 4}))
    engine = Fsdp.__new__(Fsdp)  # building it would need a GPU
    engine.plan, engine.notes = plan(recipe, "fsdp_full_shard", 2), []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    network = pretrained(engine, recipe, compute_dtype(engine.plan))
    packed = [each for each in network.parameters() if isinstance(each, Params4bit)]
    assert len(packed) == 2 * 7  # of two layers
    assert {each.device.type for each in network.parameters()} == {"cpu"}
    assert {each.quant_state.absmax.device.type for each in packed} == {"cpu"}
