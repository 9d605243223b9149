"""Jobs by ssh on hosts that the test makes: servers of ssh on ports of this machine."""

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import ROOT, end_tree, losses, start, wait_for, warm_python, write_recipe

from finetune.launchers.accelerate import free_port
from finetune.runs.run import Run

HOSTS = ("alpha", "beta")
SERVER = """
ListenAddress 127.0.0.1
Port {port}
HostKey {folder}/key
AuthorizedKeysFile {folder}/key.pub
PidFile none
StrictModes no
UsePAM no
"""
CLIENT = """
Host {name}
    HostName 127.0.0.1
    Port {port}
    User root
    IdentityFile {folder}/key
    IdentitiesOnly yes
    UserKnownHostsFile /dev/null
    StrictHostKeyChecking no
    LogLevel ERROR
"""
SECTIONS = {"max_steps": 300, "saving": {"every": 300}, "evaluation": {"every": 300}}
WORDS = ("--backend", "ddp", "--precision", "fp32", "--no-plot", "--launcher", "hosts")


@pytest.fixture(scope="module")
def ssh(tmp_path_factory) -> Iterator[Path]:
    """A configuration for ssh with two hosts."""
    if os.geteuid() != 0 or shutil.which("ssh") is None or not Path("/usr/sbin/sshd").exists():
        pytest.skip("servers of ssh need root and openssh-server")
    folder = tmp_path_factory.mktemp("ssh")
    subprocess.run(
        ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / "key"], check=True
    )
    Path("/run/sshd").mkdir(exist_ok=True)
    servers: list[subprocess.Popen[bytes]] = []
    client = ""
    for name in HOSTS:
        port = free_port()
        text = SERVER.format(port=port, folder=folder)
        (folder / name).write_text(text)
        client += CLIENT.format(name=name, port=port, folder=folder)
        servers.append(subprocess.Popen(
            ["/usr/sbin/sshd", "-D", "-e", "-f", folder / name], stderr=subprocess.DEVNULL,
            start_new_session=True,
        ))  # fmt: skip
    (folder / "config").write_text(client)
    for name in HOSTS:
        command = ["ssh", "-F", str(folder / "config"), name, "true"]
        for _ in range(50):
            if subprocess.run(command, capture_output=True).returncode == 0:
                break
            time.sleep(0.1)
    yield folder / "config"
    for server in servers:
        with contextlib.suppress(ProcessLookupError):
            end_tree(server.pid)
        server.wait()


@pytest.fixture
def cluster(ssh, tmp_path) -> Path:
    """The settings of both hosts."""
    path = tmp_path / "both.yaml"
    path.write_text(
        f"hosts: [{', '.join(HOSTS)}]\nssh: [-F, {ssh}]\naddress: 127.0.0.1\n"
        f"environment: {{PYTHONPATH: {ROOT}, HF_HUB_OFFLINE: '1', OMP_NUM_THREADS: '1'}}\n"
        f"command: {warm_python()} -P -m finetune\n"
    )
    return path


@pytest.fixture
def recipe(tiny, tmp_path: Path) -> Path:
    return write_recipe(tmp_path / "recipe.json", tiny.fields(**SECTIONS))


@pytest.mark.slow
def test_two_hosts_train_as_one_job_which_ends_with_each_of_them_and_goes_on(
    run_of, finetune, recipe, cluster, tmp_path, session_cache
):
    """It ends in three ways, one after another; its lines have the names of the hosts."""
    straight, run = run_of("ddp", **SECTIONS), Run(tmp_path / "run")
    words = ["launch", str(recipe), *WORDS, "--cluster", str(cluster), "--output", str(run.root)]
    words += ["--resume", "auto"]
    for how in ("one host is ended", "it is stopped", "its launcher is killed"):
        before = run.newest() or 0
        process = start(words, session_cache, warm=True)
        wait_for(lambda before=before: len(losses(run)) > before, process)
        if how == "one host is ended":
            (on_beta,) = [pid for pid, told in launches(run).items() if "--machine_rank 1" in told]
            os.kill(on_beta, signal.SIGTERM)
        elif how == "it is stopped":
            told = finetune("stop", run.root).passed().stdout
            assert told == f"{run.root}: its hosts were asked to save and end\n"
        else:
            process.kill()
        _, told = process.communicate(timeout=120)
        assert process.returncode == (-9 if how == "its launcher is killed" else 75), told
        assert finetune("watch", run.root).status == 75
        assert before < run.newest() < 300, how
    done = finetune(*words).passed()
    assert "alpha: step 300/300" in done.stdout
    assert "beta: rank 1 of 2: waiting" in done.stdout
    assert losses(run) == losses(straight)


def launches(run: Run) -> dict[int, str]:
    """The `finetune launch` of each host, by process id."""
    found: dict[int, str] = {}
    for place in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            words = (place / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            mine = f"finetune launch {run.root}/job/recipe.json" in words
            if mine and not words.startswith(("sh ", "ssh ", "sshd")):
                found[int(place.name)] = words
    return found


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["cluster.hosts=alpha,gamma"], "error: gamma: ssh: Could not resolve hostname gamma"),
        (["cluster.hosts=alpha,alpha"], "cluster.hosts: alpha, alpha: one of them occurs twice"),
        (["cluster.command=echo other 1"], "error: alpha: 'other 1 --version' instead of "),
    ],
)  # fmt: skip
def test_a_host_that_cannot_take_part_is_named(finetune, recipe, cluster, tmp_path, words, told):
    run = tmp_path / "run"
    done = finetune("launch", recipe, *WORDS, "--cluster", cluster, "--output", run, *words)
    assert told in done.refused()
    assert not run.exists()
