"""Check the FSDP and DeepSpeed sections of a backend's file."""

from typing import Any, Literal

Shard = Literal["none", "optimizer", "grads", "params"]

ZERO_SHARDS: dict[int, Shard] = {1: "optimizer", 2: "grads", 3: "params"}


def fsdp_problems(fsdp: dict[str, Any]) -> list[str]:
    problems: list[str] = []
    if fsdp.get("fsdp_version") != 2:
        problems.append("fsdp_config.fsdp_version: expected 2 (FSDP1 mixes up data types)")
    if not isinstance(fsdp.get("fsdp_reshard_after_forward"), bool):
        problems.append(
            "fsdp_config.fsdp_reshard_after_forward: expected true (FULL_SHARD) or false "
            "(SHARD_GRAD_OP)"
        )
    if fsdp.get("fsdp_auto_wrap_policy") != "TRANSFORMER_BASED_WRAP":
        problems.append("fsdp_config.fsdp_auto_wrap_policy: expected TRANSFORMER_BASED_WRAP")
    return problems


def zero_problems(zero: dict[str, Any]) -> list[str]:
    problems: list[str] = []
    stage = zero.get("zero_stage")
    if type(stage) is not int or stage not in ZERO_SHARDS:
        problems.append(f"deepspeed_config.zero_stage: got {stage!r}, expected 1, 2 or 3")
    for key in ("offload_optimizer_device", "offload_param_device"):
        if zero.get(key, "none") not in ("none", "cpu", "nvme"):
            problems.append(
                f"deepspeed_config.{key}: got {zero[key]!r}, expected none, cpu or nvme"
            )
    if zero.get("offload_param_device", "none") != "none" and stage != 3:
        problems.append("deepspeed_config.offload_param_device: needs zero_stage: 3")
    if zero.get("offload_param_device", "none") not in (
        "none",
        zero.get("offload_optimizer_device"),
    ):
        problems.append(
            "deepspeed_config.offload_param_device: expected offload_optimizer_device's value"
        )
    if zero.get("offload_optimizer_device") == "nvme" and stage != 3:
        problems.append("deepspeed_config.offload_optimizer_device: nvme needs zero_stage: 3")
    return problems
