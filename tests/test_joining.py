"""Machines of a job that do not find each other say who is missing, within `--join-timeout`."""

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import write_recipe

from finetune.launchers.accelerate import free_port

MINUTES = "0.03"


@contextlib.contextmanager
def silent_server() -> Iterator[int]:
    """The port of a server that accepts connections and never answers, as some proxies."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@contextlib.contextmanager
def nobody() -> Iterator[int]:
    yield free_port()


@pytest.mark.parametrize(
    ("machine", "there", "told"),
    [
        (0, nobody, "--num_machines 2: --machine_rank 1 did not join at 127.0.0.1:{port} within"),
        (1, nobody, "--machine_rank 0 cannot be reached at 127.0.0.1:{port} (--main_process_ip, "
                    "--main_process_port): Connection refused; start it, or give it more time"),
        (1, silent_server, "--main_process_port {port}: no rendezvous of this job (it does not "
                           "answer as one); give every machine the address of machine 0"),
    ],
)  # fmt: skip
def test_a_machine_that_is_missing_is_named(tiny, finetune, tmp_path: Path, machine, there, told):
    recipe = write_recipe(tmp_path / "recipe.json", tiny.fields())
    with there() as port:
        done = finetune(
            "launch", recipe, "--backend", "ddp", "--processes", "2", "--precision", "fp32",
            "--output", tmp_path / "run", "--num_machines", "2", "--machine_rank", machine,
            "--main_process_ip", "127.0.0.1", "--main_process_port", port,
            "--join-timeout", MINUTES,
        )  # fmt: skip
    assert done.status == 2
    assert told.format(port=port) in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "run").exists()
