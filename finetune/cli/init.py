"""`finetune init`: write a recipe file to edit, for data and a model or from another recipe."""

import argparse

from finetune.cli import options
from finetune.errors import FinetuneError

SUMMARY = "write a recipe file to edit, for your data and model"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", help="name of the recipe, or a path that ends in .yaml")
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="key=value", help="such as optim.lr=1e-4"
    )
    parser.add_argument("--model", metavar="NAME", help="model to train: hub name or folder")
    parser.add_argument("--data", metavar="DATA", help="a file, a folder, or a hub data set")
    parser.add_argument("--method", help="such as dpo; by default what the data holds")
    parser.add_argument("--gpu", help="name of the GPU to choose for; by default this machine")
    parser.add_argument("--gpus", type=options.count, help="number of GPUs")
    parser.add_argument(
        "--from", dest="origin", metavar="RECIPE", help="copy a recipe; default qwen3_0_6b_lora"
    )


def run(arguments: argparse.Namespace) -> int:
    from finetune.importers import recipe_file

    given = {f"--{name}": vars(arguments)[name] for name in ("method", "gpu", "gpus")}
    idle = [name for name, value in given.items() if value is not None]
    model, data = arguments.model, arguments.data
    if (model is None) != (data is None) or (idle and data is None):
        raise FinetuneError("give --model and --data, from which the recipe is made")
    if data is None:
        origin = arguments.origin or "qwen3_0_6b_lora"
        return recipe_file.init(arguments.name, origin, arguments.overrides)
    if arguments.origin is not None:
        raise FinetuneError("--from copies a recipe; leave it out, or --model and --data")
    path = recipe_file.path_of(arguments.name)
    from finetune.importers import proposal

    options.without_bars()
    found = proposal.propose(
        model, data, arguments.method, arguments.gpu, arguments.gpus, arguments.overrides
    )
    print(proposal.write(path, found, model, data))
    return 0
