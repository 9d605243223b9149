"""`finetune teach`: store a teacher's log-probabilities, for distillation without the teacher."""

import argparse

from finetune.cli import options

SUMMARY = "store a teacher's log-probabilities, for distillation without the teacher"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.recipe_words(parser)
    options.add(parser, "--top-k N=64  tokens stored for each label")
    about = "folder to write"
    parser.add_argument("--output", type=options.local_path, required=True, help=about)


def run(arguments: argparse.Namespace) -> int:
    from finetune import catalog
    from finetune.checks.files import check_files
    from finetune.models.starting_run import resolved

    recipe = resolved(catalog.resolve(arguments.recipe, arguments.overrides))
    check_files(recipe)
    from finetune.inference.teach import teach

    options.without_bars()
    labels = teach(recipe, arguments.output, arguments.top_k)
    print(f"{labels:,} labels, {arguments.top_k} log-probabilities each, in {arguments.output}")
    print("train on them: teacher=null teacher_logps=" + str(arguments.output))
    return 0
