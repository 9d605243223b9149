"""`finetune train`: train in this process, which a launcher may have started."""

import argparse

from finetune.cli import options

SUMMARY = "train in this process (or under `accelerate launch`)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.recipe_words(parser)
    table = """
    --backend NAME  backend of a run not launched by Accelerate
    --precision bf16|fp16|fp32  instead of the backend's
    """
    options.add(parser, table)
    options.run_words(parser)


def run(arguments: argparse.Namespace) -> int:
    from finetune.checks.request import check_here, read_words
    from finetune.process import error_report
    from finetune.process.imports import collecting_later, compiling_later, read_models_once
    from finetune.process.quiet import growing_segments

    error_report.forget_earlier_attempts()
    growing_segments()
    recipe = read_words(arguments.recipe, arguments.overrides, arguments.backend)
    plan = check_here(recipe, arguments.backend, arguments.precision)  # before importing torch
    with collecting_later(), compiling_later():
        read_models_once()
        from finetune.training.run_options import Options
        from finetune.training.worker import carry_out

    how = Options(
        options.output_of(arguments),
        options.resume_of(arguments),
        arguments.nvme_path,
        arguments.timeout,
        arguments.profile,
        not arguments.no_plot,
        arguments.end_by,
    )
    carry_out(plan, how)
    return 0
