"""`finetune chat`: chat with a run's model."""

import argparse
import os
import sys

from finetune.cli import options
from finetune.errors import FinetuneError

SUMMARY = "chat with a run's model"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run", type=options.run_word, help="run directory, or a folder with a model"
    )
    parser.add_argument("--prompt", help="answer this prompt instead of starting a conversation")
    parser.add_argument(
        "--image", action="append", default=[], metavar="FILE",
        help="show the model this image with --prompt; may be repeated",
    )  # fmt: skip
    parser.add_argument("--max-new-tokens", type=options.count, default=512)


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
