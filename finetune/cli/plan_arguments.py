"""The words of `finetune plan` after the recipe: they are there before the planner is imported."""

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The machine that is planned for; without `--gpu` the one that this runs on."""
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
    parser.add_argument("--tensor", type=int, metavar="N", help="tensor parallel: arithmetic only")
    parser.add_argument("--pipeline", type=int, metavar="N", help="stages of a pipeline: the same")
    parser.add_argument("--fit", action="store_true", help="largest micro-batch, fewest changes")
    parser.add_argument(
        "--verify", action="store_true", help="trace a step of the real model with fake tensors"
    )
