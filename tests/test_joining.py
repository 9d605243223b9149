"""Machines of a job that do not find each other say who is missing, within `--join-timeout`."""

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import write_recipe

from finetune import FinetuneError
from finetune.launchers import variables
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


def test_the_machines_of_srun_are_those_of_the_job(monkeypatch):
    assert variables.flags([]) == []
    known = {"JOB_ID": "12345", "STEP_ID": "2", "STEP_NUM_NODES": "2", "STEP_NUM_TASKS": "2",
             "NODEID": "1", "STEP_NODELIST": "127.0.0.[1,2],b7"}  # fmt: skip
    for name, value in known.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    assert variables.flags([]) == [
        "--num_machines", "2", "--machine_rank", "1", "--main_process_ip", "127.0.0.1",
        "--main_process_port", "22347",
    ]  # fmt: skip
    assert variables.flags(["--num-machines=1"]) == []
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "8")
    with pytest.raises(FinetuneError, match=r"8 tasks on 2 nodes.*srun --ntasks-per-node 1"):
        variables.flags([])


@pytest.mark.parametrize(
    ("hosts", "first"),
    [("a1", "a1"), ("a[1-3,7],b", "a1"), ("g-[007-9].lan", "g-007.lan"), ("r[1-2]n[3,4]", "r1n3")],
)
def test_the_first_host_of_slurms_list_is_machine_0(hosts, first):
    assert variables.first_host(hosts) == first
