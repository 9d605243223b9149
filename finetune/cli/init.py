"""`finetune init`: write a recipe file to edit, for data and a model or from another recipe."""

import argparse

from finetune.cli import options
from finetune.errors import FinetuneError

SUMMARY = "write a recipe file to edit, for your data and model"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", help="name of the recipe, or a path that ends in .yaml")
    options.override_words(parser)
    table = """
    --model NAME  model to train: hub name or folder
    --data DATA  a file, a folder, or a hub data set
    --method NAME  such as dpo; by default what the data holds
    --gpu NAME  name of the GPU to choose for; by default this machine
    --gpus N  number of GPUs
    """
    options.add(parser, table)
    about = "copy a recipe; default qwen3_0_6b_lora"
    parser.add_argument("--from", dest="origin", metavar="RECIPE", help=about)


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
