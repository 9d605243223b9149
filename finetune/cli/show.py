"""`finetune show`: print a recipe with every field."""

import argparse
import json

from finetune.cli import options

SUMMARY = "print a recipe with every field"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.recipe_words(parser)
    options.add(parser, "--json  print JSON")


def run(arguments: argparse.Namespace) -> int:
    import yaml

    from finetune import catalog

    fields = catalog.to_fields(catalog.resolve(arguments.recipe, arguments.overrides))
    if arguments.json:
        print(json.dumps(fields, indent=2))
    else:
        print(yaml.safe_dump(fields, sort_keys=False), end="")
    return 0
