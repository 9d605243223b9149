"""Read backends: the YAML files for `accelerate launch --config_file`.

Accelerate silently ignores a misspelled nested key. Files are therefore read strictly here, and the
settings that reach the launched process (`launched`) are compared with them before anything is
built.
"""

import dataclasses
import functools
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, cast

from finetune.backend import axes as model_axes
from finetune.backend import engine_options, megatron
from finetune.backend.axes import UNDIVIDED, Axes
from finetune.backend.engine_options import Shard
from finetune.errors import FinetuneError, did_you_mean, one_line, reading, refuse
from finetune.process.rendezvous import launcher_arguments, world
from finetune.process.yaml_text import read_yaml

Engine = Literal["single", "ddp", "fsdp", "deepspeed", "mesh"]
Offload = Literal["none", "optimizer", "all"]
Precision = Literal["bf16", "fp16", "fp32"]

PRECISIONS: dict[str, Precision] = {"bf16": "bf16", "fp16": "fp16", "no": "fp32"}
MIXED: dict[Precision, str] = {ours: theirs for theirs, ours in PRECISIONS.items()}
"""Accelerate's name of each precision."""
ENGINES: dict[str, Engine] = {
    "NO": "single",
    "MULTI_GPU": "ddp",
    "MULTI_CPU": "ddp",
    "FSDP": "fsdp",
    "DEEPSPEED": "deepspeed",
}

TOP_KEYS = {
    "compute_environment", "debug", "deepspeed_config", "distributed_type", "enable_cpu_affinity",
    "fsdp_config", "gpu_ids", "machine_rank", "main_process_ip", "main_process_port",
    "main_training_function", "mixed_precision", "num_machines", "num_processes",
    "parallelism_config", "rdzv_backend", "same_network", "use_cpu",
}  # fmt: skip
FSDP_KEYS = {
    "fsdp_version", "fsdp_reshard_after_forward", "fsdp_auto_wrap_policy", "fsdp_state_dict_type",
    "fsdp_offload_params", "fsdp_cpu_ram_efficient_loading", "fsdp_transformer_layer_cls_to_wrap",
}  # fmt: skip
ZERO_KEYS = {
    "zero_stage", "offload_optimizer_device", "offload_param_device", "zero3_init_flag",
    "zero3_save_16bit_model", "deepspeed_multinode_launcher", "deepspeed_hostfile",
    "deepspeed_moe_layer_cls_names",
}  # fmt: skip
RECIPE_OWNS = {
    "gradient_accumulation_steps": "derived from batch.rows, batch.micro_rows and the processes",
    "gradient_clipping": "optim.max_grad_norm",
    "fsdp_activation_checkpointing": "model.activation_checkpointing",
}
OURS = {
    "deepspeed_config_file": "the toolkit writes DeepSpeed's configuration from this file",
    "offload_optimizer_nvme_path": "Accelerate drops it; pass --nvme-path to finetune",
    "offload_param_nvme_path": "Accelerate drops it; pass --nvme-path to finetune",
}


@dataclasses.dataclass(frozen=True)
class Backend:
    """Engine, sharding, offload and precision: the machine settings that training depends on."""

    name: str
    engine: Engine
    shard: Shard = "none"
    offload: Offload = "none"
    device: Literal["none", "cpu", "nvme"] = "none"
    """Device for offloaded state."""
    precision: Precision = "bf16"
    processes: int = 1
    """Default number of processes."""
    zero_init: bool = False
    """ZeRO-3: partition pretrained weights while loading them."""
    shard_size: int | None = None
    """Hybrid sharding: processes over which one copy of the model is sharded; None for all."""
    axes: Axes = UNDIVIDED
    """Division of the model over processes that train on the same rows."""
    path: Path | None = None

    def same_as(self, other: "Backend") -> list[str]:
        """Differences as `field: this != that`, ignoring name, path and processes."""
        fields = (
            "engine", "shard", "offload", "device", "precision", "zero_init", "shard_size", "axes",
        )  # fmt: skip
        pairs = ((field, getattr(self, field), getattr(other, field)) for field in fields)
        return [f"{field}: {mine} != {theirs}" for field, mine, theirs in pairs if mine != theirs]


def folders() -> list[Path]:
    """Folders to search for backends: that of the working directory, then the shipped ones."""
    package = Path(__file__).parents[1]
    shipped = package / "accelerate_configs"  # in a wheel; next to the package in a checkout
    return [Path("accelerate_configs"), shipped, package.parent / "accelerate_configs"]


def names() -> list[str]:
    """Names of all available backends."""
    return sorted({path.stem for folder in folders() for path in folder.glob("*.yaml")})


def find(name: str) -> Path:
    """The YAML file of a backend, by name or path.

    Raises:
        FinetuneError: the backend does not exist.
    """
    if name.endswith((".yaml", ".yml")):
        if os.path.isfile(name):
            return Path(name)
        raise FinetuneError(f"backend {name}: no such file")
    for folder in folders():
        if os.path.isfile(path := folder / f"{name}.yaml"):
            return path
    if name == megatron.NAME:
        raise FinetuneError(f"backend {name}: {megatron.REASON}; {megatron.INSTEAD}")
    known = names()
    raise FinetuneError(
        f"backend '{name}': unknown{did_you_mean(name, known)}; known are {', '.join(known)}"
    )


_parsed = functools.lru_cache(read_yaml)  # the same few files for many plans; never changed


def describe(name: str) -> str:
    """The comment in the first line of a backend's file, or the reason why it cannot be read."""
    try:
        first = find(name).read_text(encoding="utf-8").split("\n")[0]
    except (OSError, ValueError) as error:
        return one_line(f"(cannot be read: {error})")
    return first.removeprefix("#").strip()


def load(name: str) -> Backend:
    """Read a backend strictly: an unknown key, which Accelerate would ignore, is an error.

    Raises:
        FinetuneError: contains every problem of the file.
    """
    path = find(name)
    with reading(f"{path}: not YAML"):
        read = _parsed(path.read_text(encoding="utf-8"))
    if not isinstance(read, dict):
        raise FinetuneError(f"{path}: expected keys and values, got {type(read).__name__}")
    config = cast(dict[str, Any], read)
    check = megatron.problems if config.get("distributed_type") == megatron.KIND else _key_problems
    problems = check(config) or _value_problems(config)
    refuse(f"{path}: {problem}" for problem in problems)
    return _from_config(path, config)


def _key_problems(config: dict[str, Any]) -> list[str]:
    known_sections = {
        "fsdp_config": FSDP_KEYS,
        "deepspeed_config": ZERO_KEYS,
        "parallelism_config": model_axes.keys(),
    }
    problems: list[str] = []
    places: list[tuple[str, dict[str, Any], set[str]]] = [("", config, TOP_KEYS)]
    for section, keys in known_sections.items():
        inner = config.get(section, {})
        if isinstance(inner, dict):
            places.append((f"{section}.", cast(dict[str, Any], inner), keys))
        else:
            problems.append(f"{section}: expected keys and values, got {inner!r}")
    for prefix, values, known in places:
        for key in values:
            if key in RECIPE_OWNS:
                problems.append(
                    f"{prefix}{key}: the recipe owns this ({RECIPE_OWNS[key]}); remove it"
                )
            elif key in OURS:
                problems.append(f"{prefix}{key}: {OURS[key]}; remove it")
            elif key not in known:
                full = prefix.replace(".", f"_{key}")  # Accelerate repeats the section's name
                hint = (
                    f"; did you mean '{full}'?" if full in known else did_you_mean(str(key), known)
                )
                problems.append(f"{prefix}{key}: unknown key{hint}")
    return problems


def _value_problems(config: dict[str, Any]) -> list[str]:
    problems: list[str] = []
    kind = config.get("distributed_type")
    if not isinstance(kind, str) or kind not in ENGINES:
        problems.append(f"distributed_type: got {kind!r}, expected one of {', '.join(ENGINES)}")
    got = config.get("mixed_precision")
    if not isinstance(got, str) or got not in PRECISIONS:
        problems.append(f"mixed_precision: got {got!r}, expected 'bf16', 'fp16' or 'no' (quoted)")
    processes = config.get("num_processes", 1)
    if type(processes) is not int or processes < 1:
        problems.append(f"num_processes: got {processes!r}, expected a whole number of at least 1")
    fsdp, zero = config.get("fsdp_config"), config.get("deepspeed_config")
    if (fsdp is not None) != (kind == "FSDP"):
        problems.append("fsdp_config: valid only with distributed_type: FSDP")
    if (zero is not None) != (kind == "DEEPSPEED"):
        problems.append("deepspeed_config: valid only with distributed_type: DEEPSPEED")
    if fsdp is not None:
        problems += engine_options.fsdp_problems(fsdp)
    if config.get("parallelism_config") is not None:
        problems += model_axes.mesh_problems(config)
    if zero is not None:
        problems += engine_options.zero_problems(zero)
    return problems


def _from_config(path: Path, config: dict[str, Any]) -> Backend:
    """Convert a file to the variables of a launched process, and these to a backend."""
    environment = {"ACCELERATE_MIXED_PRECISION": str(config["mixed_precision"])}
    if fsdp := config.get("fsdp_config"):
        environment |= {"ACCELERATE_USE_FSDP": "true"}
        environment |= {key.upper(): str(value) for key, value in fsdp.items()}
    if mesh := config.get("parallelism_config"):
        environment |= {"ACCELERATE_USE_PARALLELISM_CONFIG": "true"}
        environment |= {key.upper(): str(value) for key, value in mesh.items()}
    if zero := config.get("deepspeed_config"):
        environment |= {"ACCELERATE_USE_DEEPSPEED": "true"}
        environment |= {
            f"ACCELERATE_DEEPSPEED_{key.removesuffix('_flag').upper()}": str(value)
            for key, value in zero.items()
        }
    several = ENGINES[config["distributed_type"]] != "single"
    processes = int(config.get("num_processes", 2 if several else 1))
    environment["WORLD_SIZE"] = "2" if several else "1"  # decides between single and ddp only
    built = from_environment(environment, path.stem)
    return dataclasses.replace(built, processes=processes, path=path)


def from_environment(environment: Mapping[str, str], name: str = "launched") -> Backend:
    """The backend that `accelerate launch` passed to a process in environment variables."""

    def given(key: str, default: str = "none") -> str:
        return environment.get(key, default).lower()

    precision = PRECISIONS.get(given("ACCELERATE_MIXED_PRECISION", "no"))
    if precision is None:
        got = environment["ACCELERATE_MIXED_PRECISION"]
        raise FinetuneError(f"--mixed_precision {got}: expected bf16, fp16 or no")
    processes = int(environment.get("WORLD_SIZE", "1"))
    shared = {"name": name, "precision": precision, "processes": processes}
    axes = UNDIVIDED
    if given("ACCELERATE_USE_PARALLELISM_CONFIG") == "true":
        axes = model_axes.from_variables(environment)
    if axes.any and given("ACCELERATE_USE_FSDP") == "true":
        raise FinetuneError(
            f"{axes.words()} with Accelerate's FSDP: not supported; use "
            "distributed_type: MULTI_GPU, where parallelism_config_dp_shard_size shards with FSDP2"
        )
    if axes.any:
        copies, shard = (model_axes.size_of(environment, key) for key in model_axes.DATA)
        return Backend(
            engine="mesh",
            shard="params" if shard > 1 else "none",
            shard_size=shard if copies > 1 else None,
            axes=axes,
            **shared,  # type: ignore[arg-type]
        )
    if given("ACCELERATE_USE_DEEPSPEED") == "true":
        optimizer = given("ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE")
        parameters = given("ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE")
        return Backend(
            engine="deepspeed",
            shard=engine_options.ZERO_SHARDS.get(
                int(given("ACCELERATE_DEEPSPEED_ZERO_STAGE", "0")), "none"
            ),
            offload="none"
            if optimizer == "none"
            else "all"
            if parameters != "none"
            else "optimizer",
            device=optimizer,  # type: ignore[arg-type]
            zero_init=given("ACCELERATE_DEEPSPEED_ZERO3_INIT") == "true",
            **shared,  # type: ignore[arg-type]
        )
    if given("ACCELERATE_USE_FSDP") == "true":
        offload = given("FSDP_OFFLOAD_PARAMS") == "true"
        return Backend(
            engine="fsdp",
            shard="params" if given("FSDP_RESHARD_AFTER_FORWARD", "true") == "true" else "grads",
            offload="all" if offload else "none",
            device="cpu" if offload else "none",
            shard_size=_shard_size(environment),
            **shared,  # type: ignore[arg-type]
        )
    return Backend(engine="single" if processes == 1 else "ddp", **shared)  # type: ignore[arg-type]


def _shard_size(environment: Mapping[str, str]) -> int | None:
    if environment.get("ACCELERATE_USE_PARALLELISM_CONFIG", "").lower() != "true":
        return None
    return model_axes.size_of(environment, "dp_shard")


def divided(
    backend: Backend, processes: int | None, sizes: Mapping[str, int | str | None]
) -> tuple[Backend, int]:
    """The backend with the axes of a job, and the number of processes of the job.

    Args:
        processes: number of processes; None scales those of the backend's file with the axes.
        sizes: axis sizes, schedule and rotation, by the fields of `Axes`; None keeps that of the
            file.

    Raises:
        FinetuneError: contains every axis that the backend does not have or that is too small.
    """
    asked: dict[str, Any] = {field: size for field, size in sizes.items() if size is not None}
    problems: list[str] = []
    for field, size in asked.items():
        axis = model_axes.WORDS.get(field, field)
        if getattr(backend.axes, axis) == 1:
            problems.append(
                f"--{field} {size}: {backend.name} has no such axis; the backends with one are "
                f"{', '.join(_with_axis(axis))}"
            )
        elif axis == field and size < 2:
            problems.append(
                f"--{field} {size}: expected at least 2; for 1, use a backend without this axis"
            )
    refuse(problems)
    changed = dataclasses.replace(backend, axes=dataclasses.replace(backend.axes, **asked))
    data = backend.processes // backend.axes.processes
    if backend.shard != "none":  # a larger experts axis may need more data parallel processes
        data = math.lcm(data, changed.axes.experts) if "experts" in asked else data
    return changed, data * changed.axes.processes if processes is None else processes


def _with_axis(field: str) -> list[str]:
    (key,) = (key for key, name in model_axes.KEYS.items() if name == field)
    return [name for name in names() if key in name.split("_")]


def sized(
    backend: Backend, processes: int, nodes: int = 1, shard_size: int | None = None
) -> Backend:
    """The backend with the shard size of a job.

    By default, hybrid sharding keeps one copy per node, or uses the size in the backend's file on a
    single node.

    Args:
        nodes: number of machines of the job.
        shard_size: processes over which one copy is sharded.

    Raises:
        FinetuneError: the size does not divide the processes, or a copy would cross nodes.
    """
    if backend.shard_size is None or backend.axes.any:
        if shard_size is None:
            return backend
        raise FinetuneError(
            f"--shard-size {shard_size}: {backend.name} keeps a single copy of the model; "
            "hsdp and hsdp_shard_grad_op keep several"
        )
    per_node = processes // nodes
    usual = per_node if nodes > 1 else min(backend.shard_size, processes)
    chosen = usual if shard_size is None else shard_size
    if chosen < 2:
        raise FinetuneError(
            f"--shard-size {chosen}: a copy needs at least 2 processes; use ddp, or more processes"
        )
    if processes % chosen:
        raise FinetuneError(
            f"--shard-size {chosen}: {processes} processes do not divide into copies of {chosen}"
        )
    if nodes > 1 and (per_node % chosen or processes % nodes):
        raise FinetuneError(
            f"--shard-size {chosen}: a copy would cross nodes, which have {per_node} processes each"
        )
    return dataclasses.replace(backend, shard_size=chosen)


def launched() -> Backend | None:
    """The backend with which this process was launched; None if not launched by Accelerate.

    If the launcher was given a file, the settings that reached this process are compared with it.

    Raises:
        FinetuneError: the file is invalid, or one of its settings was lost.
    """
    if "ACCELERATE_MIXED_PRECISION" not in os.environ:
        return None
    if world() > 1 and "RANK" not in os.environ:
        raise FinetuneError(
            f"WORLD_SIZE={world()}: set without RANK, as by accelerate.debug_launcher; use "
            "accelerate.notebook_launcher, finetune launch or torchrun"
        )
    if os.environ.get("ACCELERATE_USE_MEGATRON_LM", "").lower() == "true":
        raise FinetuneError(
            f"accelerate launch --use_megatron_lm: {megatron.REASON}; {megatron.INSTEAD}"
        )
    arguments = launcher_arguments()
    named = [arguments[i + 1] for i, word in enumerate(arguments[:-1]) if word == "--config_file"]
    asked = load(named[0]) if named else None
    # Settings that Accelerate drops from the file, unless `finetune launch` set them.
    forgotten = {} if asked is None else asked.axes.variables()
    arrived = from_environment({**forgotten, **os.environ})
    _refuse_other_product(arrived)
    if asked is None:
        return arrived
    flags = {word.lstrip("-") for word in arguments if word.startswith("--")}
    overridden = {
        "mixed_precision": "precision",
        "parallelism_config_dp_shard_size": "shard_size",
        **{f"parallelism_config_{key}_size": "axes" for key in model_axes.KEYS},
        f"parallelism_config_{model_axes.ROTATION}": "axes",
    }
    if arrived.axes.variables() != forgotten:  # set by `finetune launch`
        overridden["config_file"] = "axes"
    lost = [
        difference
        for difference in asked.same_as(arrived)
        if not any(
            flag in flags and difference.startswith(field) for flag, field in overridden.items()
        )
        and not (difference.startswith("engine: ddp != single") and arrived.processes == 1)
    ]
    refuse(f"{named[0]}: Accelerate dropped a setting: {what}" for what in lost)
    return dataclasses.replace(arrived, name=asked.name, path=asked.path)


def _refuse_other_product(arrived: Backend) -> None:
    """Raise FinetuneError unless the product of the axis sizes is the number of processes."""
    if os.environ.get("ACCELERATE_USE_PARALLELISM_CONFIG", "").lower() != "true":
        return
    copies, shard = (model_axes.size_of(os.environ, key) for key in model_axes.DATA)
    if arrived.shard == "none" and not arrived.axes.any and shard > 1:
        raise FinetuneError(
            f"parallelism_config: {shard} processes should share one copy of the model, but "
            "neither FSDP nor an axis that divides the model was passed on, so each process would "
            "keep a complete copy; use accelerate launch --config_file FILE, or finetune launch"
        )
    problem = model_axes.product_problem(arrived.axes, copies, shard, world())
    if problem is not None:
        raise FinetuneError(problem)
