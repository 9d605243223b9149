"""`finetune report`: write a run's report as one HTML page."""

import argparse

from finetune.cli import options

SUMMARY = "write a run's report as one HTML page"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    table = """
    run RUN  run directory
    --proof PATH  folder of a proof of the run's recipe
    """
    options.add(parser, table)


def run(arguments: argparse.Namespace) -> int:
    from finetune.checkpoints.copies import share
    from finetune.reports.page import report
    from finetune.runs.run import open_run

    run = open_run(arguments.run)
    if arguments.proof is not None:
        from finetune.reports.proof_page import take_proof

        take_proof(run, arguments.proof)
    print(f"wrote {report(run)}")
    share(run)
    return 0
