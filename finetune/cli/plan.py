"""`finetune plan`: derive the plan of a recipe on a backend and a machine, or why it cannot run."""

import argparse

from finetune.cli import options

SUMMARY = "what a recipe means on a backend, or why it cannot run"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.recipe_words(parser)
    options.backend_words(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_machine(parser)


def add_machine(parser: argparse.ArgumentParser) -> None:
    """Add options that describe the machine to plan for; without `--gpu` it is this machine."""
    parser.add_argument("--gpu", help="name of the GPU, such as H100-80, A100-40, RTX4090")
    parser.add_argument("--gpus", type=int, help="GPUs of the whole job")
    parser.add_argument("--nodes", type=int, default=1, help="machines that hold them")
    parser.add_argument("--link", help="between GPUs of a node: nvlink, pcie4, pcie5, ...")
    parser.add_argument("--network", help="between nodes: ib400, or 10gbe/node of one port")
    parser.add_argument("--host-ram", type=float, metavar="GB", help="host memory of a node")
    parser.add_argument("--gpu-memory", type=float, metavar="GB", help="of a GPU without a name")
    parser.add_argument("--tflops", type=float, help="its dense 16-bit rate")
    parser.add_argument("--bandwidth", type=float, metavar="GB/s", help="of its own memory")
    parser.add_argument("--price", type=float, help="per GPU and hour")
    parser.add_argument("--rows", type=int, help="rows of the training set, for the whole run")
    parser.add_argument("--row-tokens", type=int, help="tokens of a row on average, for packing")
    parser.add_argument("--fit", action="store_true", help="largest micro-batch, fewest changes")
    parser.add_argument(
        "--html", metavar="FILE", help="write a page with the mesh, its memory and its schedule"
    )
    parser.add_argument(
        "--verify", action="store_true", help="trace a step of the real model with fake tensors"
    )


def run(arguments: argparse.Namespace) -> int:
    from finetune import backend
    from finetune.cli import plan_on_machine
    from finetune.training.preflight import below_a_plan, check, read_words
    from finetune.verification.memory.launch import verify

    recipe = read_words(arguments.recipe, arguments.overrides, arguments.backend)
    if not (arguments.gpu or arguments.gpus):
        machine = backend.load(arguments.backend or recipe.backend)
        sizes = options.axes_of(arguments)
        machine, count = backend.divided(machine, arguments.processes, sizes)
        machine = backend.sized(machine, count, shard_size=arguments.shard_size)
        check(recipe, machine, count, arguments.precision, files=False)
    asked = verify if arguments.verify else None
    status = plan_on_machine.run(arguments, recipe, asked, verify, _rate)
    if not arguments.json:
        for line in below_a_plan(recipe):
            print(line)
    return status


def _rate(precision: str) -> float:
    from finetune.kernels.matmul_rate import rate_of_products  # imports torch, which takes seconds

    return rate_of_products(precision)
