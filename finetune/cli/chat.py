"""`finetune chat`: chat with a run's model."""

import argparse
import os
import sys

from finetune.cli import options
from finetune.errors import FinetuneError

SUMMARY = "chat with a run's model"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    table = """
    run RUN  run directory, or a folder with a model
    --prompt TEXT  answer this prompt instead of starting a conversation
    --max-new-tokens N=512  most tokens of an answer
    """
    options.add(parser, table)
    about = "show the model this image with --prompt; may be repeated"
    parser.add_argument("--image", action="append", default=[], metavar="FILE", help=about)


def run(arguments: argparse.Namespace) -> int:
    if not os.path.isdir(arguments.run):
        raise FinetuneError(
            f"{arguments.run}: no such folder; name a run, or a folder with a model"
        )
    if arguments.image and arguments.prompt is None:
        raise FinetuneError("--image: it goes with --prompt; in a conversation, type /image FILE")
    from finetune.inference.chat import answer, chat
    from finetune.inference.generate import open_model

    options.without_bars()
    loaded = open_model(arguments.run)
    if arguments.prompt is not None:
        answer(loaded, arguments.prompt, arguments.max_new_tokens, arguments.image)
    else:
        chat(loaded, max_new_tokens=arguments.max_new_tokens, typed=sys.stdin.isatty())
    return 0
