"""`finetune list`: list the available recipes and backends."""

import argparse
import json

SUMMARY = "list recipes and backends"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    from finetune import backend, catalog

    recipes = {name: catalog.describe(path) for name, path in catalog.names().items()}
    backends = {name: backend.describe(name) for name in backend.names()}
    if arguments.json:
        print(json.dumps({"recipes": recipes, "backends": backends}, indent=2))
        return 0
    for title, rows in (("recipes", recipes), ("backends", backends)):
        print(title)
        width = max((len(name) for name in rows), default=0)
        for name, summary in rows.items():
            print(f"  {name:<{width}}  {summary}")
    return 0
