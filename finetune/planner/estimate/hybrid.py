"""Hybrid sharding (HSDP): shards within a node, copies over nodes. No backend runs it."""

import dataclasses

from finetune import backend as backends
from finetune.errors import FinetuneError
from finetune.planner.estimate.hardware import Machine
from finetune.planner.plan import Plan, plan
from finetune.recipe import Recipe

SHARDS = {"hsdp": "fsdp_full_shard", "hsdp_shard_grad_op": "fsdp_shard_grad_op"}
"""The backend that shards each copy as the name says."""


def plan_hybrid(
    recipe: Recipe,
    name: str,
    machine: Machine | None,
    precision: backends.Precision | None = None,
) -> Plan:
    """The plan of a recipe on a machine whose nodes each hold a whole copy, sharded within.

    Raises:
        FinetuneError: there is no machine or only one node, or the recipe cannot be sharded.
    """
    if machine is None or machine.nodes < 2 or machine.per_node < 2:
        raise FinetuneError(
            f"--backend {name}: arithmetic of shards within a node and copies over nodes; name "
            "nodes of several GPUs: --gpu H100-80 --gpus 64 --nodes 8"
        )
    settled = plan(recipe, SHARDS[name], machine.count, precision)
    return dataclasses.replace(settled, backend=dataclasses.replace(settled.backend, name=name))
