"""`finetune plan`: derive the plan of a recipe on a backend and a machine, or why it cannot run."""

import argparse
import contextlib

from finetune.cli import options

SUMMARY = "show the plan of a recipe on a backend, or why it cannot run"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.recipe_words(parser)
    options.backend_words(parser)
    table = """
    --json  print JSON
    --gpu NAME  such as H100-80, A100-40, RTX4090; by default this machine
    --gpus INTEGER  total number of GPUs
    --nodes INTEGER=1  number of machines
    --link NAME  between GPUs of a node: nvlink, pcie4, pcie5, ...
    --network NAME  between nodes: ib400, or 10gbe/node for one port
    --host-ram GB  host memory of a node
    --gpu-memory GB  memory of a GPU that is not known by name
    --tflops NUMBER  dense 16-bit rate of that GPU
    --bandwidth GB/s  memory bandwidth of that GPU
    --price NUMBER  price per GPU and hour
    --rows INTEGER  training rows, for the time of the run
    --row-tokens INTEGER  average tokens per row, for the time
    --fit  show the largest micro-batch and fewest changes to fit
    --calibrate  show what own runs took of their predictions
    --runs PATH=runs  folder of own runs
    --html FILE  write a page with the mesh, its memory and its schedule
    --verify  trace a step of the real model with fake tensors
    """
    options.add(parser, table)


def run(arguments: argparse.Namespace) -> int:
    from finetune import backend
    from finetune.checks.request import below_a_plan, check, misnamed, read_words
    from finetune.cli import plan_on_machine
    from finetune.errors import FinetuneError, refuse
    from finetune.models.starting_adapter import complete_adapter
    from finetune.planner.families import family_of
    from finetune.planner.shapes.config_files import config_of
    from finetune.verification.memory.traced_step import measure_layers, verify

    recipe = read_words(arguments.recipe, arguments.overrides, arguments.backend)
    if not (arguments.gpu or arguments.gpus):
        machine = backend.load(arguments.backend or recipe.backend)
        sizes = options.axes_of(arguments)
        machine, count = backend.divided(machine, arguments.processes, sizes)
        machine = backend.sized(machine, count, shard_size=arguments.shard_size)
        recipe = check(recipe, machine, count, arguments.precision, files=False).recipe
    else:
        recipe = complete_adapter(recipe)
        refuse(misnamed(recipe))
    family = None
    with contextlib.suppress(FinetuneError):  # reported with the plan
        family = family_of(config_of(recipe)[0])
    model = recipe.model
    known = family is None or family.shape or family.unfit or model.reads
    if not (known or model.trust_remote_code):
        measure_layers(recipe)
    asked = verify if arguments.verify else None
    status = plan_on_machine.run(arguments, recipe, asked, _rate)
    if not arguments.json:
        for line in below_a_plan(recipe):
            print(line)
    return status


def _rate(precision: str) -> float:
    from finetune.kernels.matmul_rate import rate_of_products  # imports torch, which takes seconds

    return rate_of_products(precision)
