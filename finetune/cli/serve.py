"""`finetune serve`: serve a model with OpenAI's API and a chat page."""

import argparse
import os
from pathlib import Path

from finetune.cli import options
from finetune.errors import FinetuneError, refuse

SUMMARY = "serve a model over HTTP, with a chat page"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    table = """
    model RUN  run directory, folder with a model or adapter, or hub name
    --host HOST=127.0.0.1  address to listen on
    --port PORT=8000  0 chooses a free port
    --name NAME  name of the model in requests; by default its folder's
    --engine finetune|vllm|llama.cpp=finetune  program that serves the model; others serve an export
    --rows N=8  requests answered concurrently
    --queue N=16  further requests that may wait
    --web-images  read images at web addresses that requests name; clients choose what it reads
    """
    options.add(parser, table)
    about = "NAME=FOLDER of another adapter on the same base; may be repeated"
    parser.add_argument("--adapter", action="append", default=[], metavar="NAME=FOLDER", help=about)


def run(arguments: argparse.Namespace) -> int:
    from finetune.serving.serve import check_host, serve

    key = os.environ.get("FINETUNE_API_KEY")
    if arguments.engine != "finetune":
        from finetune.serving import external

        if arguments.adapter:
            raise FinetuneError(f"--adapter: --engine {arguments.engine} serves one folder")
        check_host(arguments.host, key)
        folder = Path(arguments.model).resolve()
        name = arguments.name or folder.name
        external.start(arguments.engine, folder, name, arguments.host, arguments.port, key)
    options.without_bars()
    serve(
        arguments.model,
        host=arguments.host,
        port=arguments.port,
        name=arguments.name,
        adapters=_adapters(arguments.adapter),
        rows=arguments.rows,
        queue=arguments.queue,
        key=key,
        web_images=arguments.web_images,
    )
    return 0


def _adapters(words: list[str]) -> dict[str, Path]:
    wrong = [word for word in words if not all(word.partition("="))]
    refuse(f"--adapter: got '{word}', expected NAME=FOLDER" for word in wrong)
    return {name: Path(folder) for name, _, folder in (word.partition("=") for word in words)}
