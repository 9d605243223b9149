"""Evaluate each category of cases with the planner's functions."""

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import published_formulas
from plan_inputs import Inputs, config_of, layout_of, shape_of, targets_of, update_of

from finetune.planner.estimate import (
    advice,
    communication,
    fewest_changes,
    memory,
    mesh_sizes,
    timing,
    totals,
)
from finetune.planner.estimate import workload as workloads
from finetune.planner.estimate.adapter_sizes import adapter_size, lora
from finetune.planner.estimate.hardware import NETWORKS, machine
from finetune.planner.estimate.head_losses import HF, LINEAR, Loss
from finetune.planner.estimate.layout import Layout, of_backend
from finetune.planner.estimate.workload import Workload
from finetune.planner.shapes.architecture import Architecture, Matrix
from finetune.planner.shapes.read_config import read

UNITS = {"GB": 1e9, "GiB": 2**30, "GB 1e9": 1e9, "bytes": 1.0}

LOSSES = {
    loss.name: loss
    for loss in (
        HF,
        LINEAR,
        # The model's output keeps a reference to the bf16 logits during the backward pass.
        Loss("hf_output_kept", exact=True, retained=2),
        # Accelerate's autocast returns fp32 logits, which the output keeps alive: 4 more bytes.
        Loss("hf_autocast", exact=True, retained=4),
        # transformers < 4.45: fp32 logits, shifted copy, log-probabilities, two gradients: 20.
        Loss("hf_pre_4.45", forward=12, saved=8, backward=16, retained=4),
        # Cross-entropy in 8 chunks of bf16 logits: an eager chunk holds 12 bytes, a compiled one 4.
        Loss("chunked8", forward=12 / 8, saved=2, backward=2 + 12 / 8),
        Loss("chunked8_compiled", forward=4 / 8, saved=2, backward=2 + 4 / 8),
        # litgpt computes fp32 cross-entropy in chunks of 128 rows, and keeps log-probabilities.
        Loss("litgpt_chunked", forward=8, saved=6, backward=10),
    )
}


def zero_states(inputs: Inputs) -> float:
    shards = {"os": "optimizer", "os+g": "grads", "os+g+p": "params", "dp": "none"}
    shards |= {"none": "none", "baseline": "none"}
    shard: Any = shards[inputs["stage"]]
    layout = Layout("ddp" if shard == "none" else "deepspeed", shard, inputs["dp"])
    held = dataclasses.replace(published_formulas.MIXED, optimizer=inputs.get("k_opt", 12)).held(
        layout
    )
    return held * inputs["params"] / UNITS[inputs.get("unit", "GB")]


def zero_factor(inputs: Inputs) -> float:
    stages: dict[int, Any] = {0: "none", 1: "optimizer", 2: "grads", 3: "params"}
    layout = Layout("deepspeed", stages[inputs["stage"]], inputs["dp"])
    return published_formulas.MIXED.saving(layout)


def seed_numbers(inputs: Inputs) -> Any:
    if "pp" in inputs:
        pipeline = inputs["pp"], inputs["microbatches"], inputs.get("virtual", 1)
        return {"bubble": published_formulas.bubble(*pipeline)}
    if "params" in inputs:
        shard: dict[str, Any] = {
            "ddp": "none",
            "zero1": "optimizer",
            "zero2": "grads",
            "zero3": "params",
            "fsdp_full": "params",
            "fsdp_grad": "grads",
        }
        layout = Layout("deepspeed", shard[inputs["strategy"]], inputs["dp"])
        each = published_formulas.FULL if inputs["dtype"] == "fp32" else published_formulas.MIXED
        parts = {
            "params": dataclasses.replace(each, gradients=0, optimizer=0),
            "grads": dataclasses.replace(each, weights=0, optimizer=0),
            "optimizer": dataclasses.replace(each, weights=0, gradients=0),
            "total": each,
        }
        held = parts[inputs["component"]].held(layout) * inputs["params"]
        return held / UNITS[inputs.get("unit", "GB")]
    if "base_lr" in inputs:
        lr = published_formulas.scaled_lr(inputs["base_lr"], inputs["world"], inputs["rule"])
        return {
            "lr": lr,
            "must_warn": published_formulas.lr_warning(inputs["world"], inputs["rule"]),
        }
    if "micro" in inputs:
        return {"effective": inputs["micro"] * inputs["accum"] * inputs["gpus"]}
    if "accum" in inputs:
        return {"comm_saved_fraction": published_formulas.no_sync_saving(inputs["accum"])}
    return {
        "bucket_mb": published_formulas.DDP_BUCKET / 2**20,
        "first_bucket_mb": published_formulas.DDP_FIRST_BUCKET / 2**20,
    }


def lora_params(inputs: Inputs) -> float:
    if "cfg" in inputs or "model" in inputs:
        return lora(shape_of(inputs), inputs["r"], targets_of(inputs)).parameters
    square = Matrix("w", inputs["d"], inputs["d"])
    count = adapter_size(square, inputs["r"]) * inputs["matrices"] * inputs["layers"]
    return count * inputs.get("bytes", 1)


def param_count(inputs: Inputs) -> Any:
    shape = shape_of(inputs)
    if shape.experts is None:
        return shape.parameters
    return {"total": shape.parameters, "active": shape.active_parameters}


def nf4(inputs: Inputs) -> float:
    if "blocksize" in inputs:
        return workloads.nf4_bits(inputs["double_quant"], inputs["blocksize"])
    weights = inputs.get("quantised_params", inputs.get("params", 0.0))
    return (workloads.nf4_bytes(weights, False) - workloads.nf4_bytes(weights)) / 1e9


def megatron_act(inputs: Inputs) -> float:
    a, s, h = inputs["a"], inputs["s"], inputs["h"]
    if "variant" not in inputs:
        share = inputs["quantity"] == "saving"
        term = published_formulas.selective_saving if share else published_formulas.attention_term
        return term(a, s, h)
    each = published_formulas.megatron_activations(
        s, inputs["b"], h, a, inputs["t"], inputs["variant"]
    )
    return each * (inputs["layers"] if inputs["per"] != "layer" else 1)


def step_time(inputs: Inputs) -> float:
    if "pcie_Bps" in inputs:
        peak = inputs["peak_tflops"] * 1e12
        return published_formulas.offload_break_even(peak, inputs["mfu"], inputs["pcie_Bps"])
    if "iter_s" in inputs:
        work = published_formulas.megatron_flops(
            inputs["batch"], inputs["s"], inputs["layers"], inputs["h"], inputs["vocab"]
        )
        peak = inputs["peak_tflops"] * 1e12 * inputs["gpus"]
        return 100 * work / inputs["iter_s"] / peak
    adapter = inputs.get("mode") in ("lora", "qlora")
    return timing.flops_per_token(
        shape_of(inputs),
        inputs["s"],
        inputs.get("causal", True),
        adapter,
        recompute=inputs.get("ckpt", False),
    )


def published_rules(inputs: Inputs) -> Any:
    gb = {
        name: value / 1e9
        for name, value in published_formulas.rules_of_thumb(inputs["params"]).items()
    }
    return gb[inputs["method"]] if "method" in inputs else gb


def deepspeed_compat(inputs: Inputs) -> dict[str, float]:
    shared = inputs["params"], inputs["gpus_per_node"], inputs["nodes"]
    factor = inputs.get("buffer_factor", 1.5)
    if "largest_layer" not in inputs:
        found = published_formulas.deepspeed_zero2(*shared, inputs["offload_optimizer"], factor)
    else:
        found = published_formulas.deepspeed_zero3(
            inputs["params"],
            inputs["largest_layer"],
            inputs["gpus_per_node"],
            inputs["nodes"],
            inputs["offload_optimizer"],
            inputs["offload_param"],
            inputs.get("zero_init", True),
            factor,
        )
    return {"cpu_bytes": found.host, "gpu_bytes": found.gpu}


def comm_volume(inputs: Inputs) -> Any:
    if "tp" in inputs:
        return published_formulas.tensor_parallel(
            inputs["layers"], inputs["h"], inputs["tokens"], inputs["tp"], inputs.get("ckpt", False)
        )
    layout = layout_of(inputs)
    whole, adapter = inputs["params"], inputs["trainable"]
    total = whole if adapter == "all" else whole + adapter
    trained = whole if adapter == "all" else adapter
    p, g = inputs["param_bytes"], inputs["grad_bytes"]
    moved = communication.volume(layout, p * total, p * trained, g * trained, inputs["accum"])
    if layout.replicas == 1:
        return moved.total
    return {"intra": moved.inside, "inter": moved.between, "total": moved.total}


def memtracker(inputs: Inputs) -> float:
    options = inputs["opts"]
    config = {**inputs["cfg"], **({"L": options["L"]} if options.get("L") else {})}
    shape = read(config_of(config))
    precision = options.get("prec", "bf16")
    schemes: dict[str, Any] = {"amp": "autocast", "lora_amp": "autocast"}
    adapted = options.get("mode", "full") != "full"
    kept = options.get("keep_out", not inputs.get("logits_freed_before_backward", True))
    wide = precision == "lora_amp"
    quantised = options.get("mode") == "qlora" or options.get("kbit", False)
    masked = inputs.get("sdpa_mask_materialised", True)
    eager = "eager" in (options.get("attn"), options.get("attn_impl"), options.get("attention"))
    workload = Workload(
        shape,
        inputs["b"],
        inputs["s"],
        scheme=schemes.get(precision, precision),
        adapter=lora(shape, options.get("lora_r", 16), targets_of(options), 4 if wide else 2)
        if adapted
        else None,
        quantization="nf4" if quantised else "none",
        kbit_prepared=options.get("kbit", False),
        checkpointing="full" if options.get("ckpt") else "none",
        attention="eager" if eager else "masked" if masked else "flash",
        loss=LOSSES["hf_output_kept" if kept else "hf"],
        stepping="foreach"
        if options.get("foreach")
        else "fused"
        if options.get("fused")
        else "loop",
        accumulation=options.get("accum", 1),
    )
    return memory.timeline(workload).peak.total


def fsdp_oracle(inputs: Inputs) -> float:
    shape = shape_of(inputs)
    workload = Workload(
        shape,
        inputs["b"],
        inputs["s"],
        scheme="fsdp" if inputs.get("master", "fp32") == "fp32" else "bf16",
        layout=layout_of({"strategy": "fsdp_full", **inputs}),
        adapter=lora(shape, inputs.get("r", 16), targets_of(inputs), 2)
        if "lora" in inputs.get("mode", "full")
        else None,
        reduce_width=2 if inputs.get("reduce") == "bf16" else 4,
        checkpointing="full" if inputs["ckpt"] else "none",
        attention="masked" if inputs.get("sdpa_mask_materialised", True) else "flash",
        root_unit=True,
    )
    return memory.timeline(workload).peak.total


def measured_peak(inputs: Inputs) -> Any:
    if "b" not in inputs:
        return memory_outcomes(inputs)
    found = totals.of(memory.timeline(workload := measured_workload(inputs)), workload)
    metric = inputs["metric"]
    if "reserved" in metric:
        value = found.reserved
    elif any(word in metric for word in ("process", "nvidia-smi", "card")):
        value = found.process
    else:
        value = found.allocated
    return value / UNITS[inputs["unit"]]


def memory_outcomes(inputs: Inputs) -> dict[str, str]:
    """The values that Accelerate's documentation reports for Mixtral on 8 A100: a size, or OOM.

    It states neither batch size nor memory counter. This uses one row of 1024 tokens, and the
    memory that the device reports, because that is what runs out.
    """
    shape, found = shape_of(inputs), {}
    for name, steps, each in (
        ("accum1", 1, False),
        ("accum2_no_sync", 2, False),
        ("accum16_sync_each_batch", 16, True),
    ):
        workload = Workload(
            shape,
            1,
            1024,
            scheme="bf16",
            layout=layout_of(inputs),
            checkpointing="full",
            accumulation=steps,
            synchronise_each=each,
        )
        taken = totals.of(memory.timeline(workload), workload)
        fits = taken.allocated <= machine("A100-80", inputs["gpus"]).usable
        found[name] = f"{taken.process / 2**30:.0f}G" if fits else "OOM"
    return found


def measured_workload(inputs: Inputs) -> Workload:
    """The workload of a published peak."""
    shape, layout = shape_of(inputs), layout_of(inputs)
    mode = inputs.get("mode", "full")
    unnamed = "nf4-dq" if mode == "qlora" else "none"
    quantization = inputs.get("quant") or mode.partition("_")[2] or unnamed
    adapted = mode != "full"
    litgpt = inputs["stack"] == "litgpt" and adapted
    # A run with neither data type nor strategy is transformers' Trainer with autocast.
    trainer = adapted and not litgpt and not any(k in inputs for k in ("dtype", "strategy", "ce"))
    schemes: dict[str, Any] = {"fp32": "fp32", "amp": "autocast", "bf16_amp": "autocast"}
    scheme: Any = "autocast" if trainer else schemes.get(inputs.get("dtype", ""), "bf16")
    if layout.engine == "fsdp" and inputs.get("master") == "fp32":
        scheme = "fsdp"
    elif layout.engine == "deepspeed":
        scheme = "deepspeed"
    # torchtune uses torchao's NF4, which always quantizes its scales too; PEFT's commands do so.
    names: dict[str, Any] = {"nf4": "nf4_single", "nf4-dq": "nf4", "none": "none"}
    if inputs["stack"] in ("torchtune", "peft"):
        names["nf4"] = "nf4"
    recompute: Any = inputs.get("ac", "full" if inputs.get("ckpt", adapted) else "none")
    adapter = None
    if adapted:
        # litgpt has a dropout of 5 % on adapter inputs by default, and PEFT's commands have 10 %;
        # the other tables have none.
        width, rank = 4 if trainer else 2, inputs.get("r", 8)
        targets = targets_of(inputs)
        if litgpt:
            shape, targets = fused(shape), ("qkv_proj",) if "q_proj" in targets else targets
        dropped = litgpt or inputs["stack"] == "peft"
        adapter = lora(shape, rank, targets, width, dropout=dropped)
    return Workload(
        shape,
        inputs["b"],
        inputs["s"] // inputs.get("cp", 1),
        scheme=scheme,
        layout=layout,
        adapter=adapter,
        quantization=names[quantization],
        kbit_prepared=inputs.get("kbit_prep_fp32", False),
        checkpointing=recompute,
        loss=LOSSES["hf_autocast"] if trainer else loss_of(inputs),
        update=update_of(inputs.get("optimizer", "adamw")),
        immediate=inputs.get("opt_in_bwd", False),
        activations_on_host=inputs.get("act_offload", False),
        compiled=inputs.get("compile", False),
        inputs_kept=litgpt and quantization != "none",
    )


def fused(shape: Architecture) -> Architecture:
    """The same model with query, key and value in one matrix, as in litgpt."""
    joint = Matrix("self_attn.qkv_proj", shape.hidden, shape.query + 2 * shape.key)
    return dataclasses.replace(shape, matrices=(joint, *shape.matrices[3:]))


def loss_of(inputs: Inputs) -> Loss:
    """The loss profile of a case."""
    name = inputs.get("ce_profile") or inputs.get("ce") or "hf"
    if name == "chunked8" and inputs.get("compile"):
        name = "chunked8_compiled"
    if name == "hf" and inputs["stack"] == "litgpt":
        name = "litgpt_chunked"
    return LOSSES["hf" if name == "eager" else name]


SPELLINGS = {
    "fsdp_shard_grad_op": ("fsdp_grad_op", "fsdp_grad"),
    "fsdp_full_shard": ("fsdp_full", "fsdp2_full"),
    "hsdp_shard_grad_op": ("hsdp_grad_op",),
    "zero2_offload": ("zero2+offload_optimizer",),
    "zero3_offload": ("zero3+offload_param", "zero3+offload", "zero3+cpu_offload"),
    "fsdp_full_shard_offload": ("fsdp_full+cpu_offload",),
    "zero3_nvme": ("zero3+nvme", "zero3+nvme_offload"),
}
"""Spellings of our backends in the cases."""


def decision(inputs: Inputs) -> dict[str, Any]:
    """The planner's choice for a scenario, in all spellings that a case may use."""
    shape, mode = shape_of(inputs), inputs["mode"]
    link, _, network = (inputs.get("link") or "").lower().partition("+")
    if link in NETWORKS or link in ("ib", "eth", "ethernet"):
        link, network = "", link
    several = inputs["gpus"] // 8 if network else 1
    networks = {"ib": "ib400", "eth": "100gbe", "ethernet": "100gbe"}
    host = inputs.get("host_ram_gb")
    hardware = machine(
        inputs["gpu"],
        inputs["gpus"],
        inputs.get("nodes", max(1, several)),
        link or None,
        networks.get(network, network) or None,
        None if host is None else host * 1e9,
    )
    adapter = lora(shape, 16, width=4) if "lora" in mode else None
    workload = Workload(
        shape,
        inputs.get("b_fits", inputs.get("b", 1)),
        inputs.get("s", 2048),
        adapter=adapter,
        quantization="nf4" if "qlora" in mode else "none",
        accumulation=inputs.get("accum", 1),
    )
    recompute: list[Any] = ["none", "full"]
    if "ckpt" in inputs:
        recompute = ["full" if inputs["ckpt"] else "none"]
    found = list(mesh_sizes.candidates(shape, hardware, "bf16"))
    asked = re.fullmatch(r"tp(\d+)", inputs.get("requested", ""))
    offered = {backend.axes.tensor for backend in found}
    refused = ["tp"] if asked and int(asked[1]) not in offered else []
    places = [of_backend(backend, hardware.count) for backend in found]
    divided = [dataclasses.replace(workload, layout=place) for place in places]
    ranked = advice.rank(
        advice.options(
            workload,
            hardware,
            recompute=recompute,
            rows_per_step=workload.rows * workload.accumulation * hardware.count,
            micro_rows=[workload.rows * count for count in (1, 2, 4, 8)],
            divided=divided,
        )
    )
    if not ranked:
        path = fewest_changes.shortest(workload, hardware) or []
        spoken = {"train an adapter (LoRA)": "lora", "QLoRA": "qlora"}
        words = ["none", *(spoken.get(made.what, made.what) for made in path)]
        return {"choice": words, "refused": refused}
    best = ranked[0]
    names = [best.name, *SPELLINGS.get(best.name, ())]
    if best.divides:
        names += ["3d", "fsdp_full+tp"] if best.name == "tp_fsdp" else ["3d"]
    if best.name.endswith("_offload") and hardware.count == 1:
        names += ["single+cpu_offload", "single+offload_optimizer", "single+offload"]
    if best.workload.checkpointing == "full":
        names += [f"{name}+ckpt" for name in names]
    if "b_wanted" in inputs:
        steps = inputs["b_wanted"] // (inputs["b_fits"] * inputs["gpus"])
        names += [f"{name}+grad_accum({steps})" for name in names]
    return {"choice": names, "refused": refused}


EVALUATORS: dict[str, Callable[[Inputs], Any]] = {
    "zero_states": zero_states,
    "zero_factor": zero_factor,
    "seed_numbers": seed_numbers,
    "lora_params": lora_params,
    "param_count": param_count,
    "nf4": nf4,
    "megatron_act": megatron_act,
    "step_time": step_time,
    "published_rules": published_rules,
    "deepspeed_compat": deepspeed_compat,
    "measured_peak": measured_peak,
    "memtracker": memtracker,
    "fsdp_oracle": fsdp_oracle,
    "comm_volume": comm_volume,
    "decision": decision,
}
