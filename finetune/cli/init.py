"""`finetune init`: write a recipe file to edit."""

import argparse

SUMMARY = "write a recipe file to edit"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", help="name of the recipe, or a path that ends in .yaml")
    parser.add_argument("--from", dest="origin", default="qwen3_0_6b_lora", metavar="RECIPE")


def run(arguments: argparse.Namespace) -> int:
    from finetune.importers import recipe_file

    return recipe_file.init(arguments.name, arguments.origin)
