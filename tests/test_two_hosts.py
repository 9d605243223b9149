"""Two hosts on one machine: network namespaces with names of their own, joined by a cable."""

import contextlib
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from conftest import FP32, ROOT, apart, environment, read, wait_for, write_recipe
from faulty import steps_made

from finetune.runs.run import Run

HOSTS = ("finetune-a", "finetune-b")
ADDRESSES = ("10.77.31.1", "10.77.31.2")
SECTIONS = {"max_steps": 30, "saving": {"every": 5}, "evaluation": {"every": 30}}
DEVICES = ("fta", "ftb")
TIMEOUT_SECONDS = 10
WARM = """
import sys
from finetune.process.warm import TRAINING, Warm
print(Warm((*TRAINING, "tests.hurried")).python, flush=True)
sys.stdin.read()
"""


class Host:
    """A host with an interpreter whose imports are done; processes of one share no memory with
    those of the other, and send their weights over the cable."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.boot()

    def boot(self) -> None:
        name = HOSTS[self.number]
        inside = f'hostname {name} && exec "$@"'
        self.machine = subprocess.Popen(
            ["ip", "netns", "exec", name, "unshare", "--kill-child", "-u", "-p", "--mount-proc",
             "sh", "-c", inside, "sh", sys.executable, "-c", WARM],
            env=environment(ROOT), text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        assert self.machine.stdout is not None
        self.python = self.machine.stdout.readline().strip()

    def lose(self) -> None:
        """End all that runs there at once."""
        self.machine.kill()
        self.machine.communicate()

    def launch(self, words: list[str], cache: Path) -> "subprocess.Popen[str]":
        """`finetune launch` there, as one of two machines."""
        machine = [
            "--num_machines", "2", "--machine_rank", str(self.number),
            "--main_process_ip", ADDRESSES[0], "--main_process_port", "29531",
        ]  # fmt: skip
        (inside,) = psutil.Process(self.machine.pid).children()
        return subprocess.Popen(
            ["nsenter", "-t", str(inside.pid), "-n", "-u", "-p", "-m", f"-w{cache}",
             self.python, "-m", "finetune", "launch", *words, *machine],
            env=environment(cache) | {"GLOO_SOCKET_IFNAME": DEVICES[self.number]},
            text=True, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def sent(self) -> int:
        """Bytes that it has sent through the cable."""
        text = Path(f"/proc/{self.machine.pid}/net/dev").read_text()
        (line,) = [line for line in text.splitlines() if f"{DEVICES[self.number]}:" in line]
        return int(line.split(":")[1].split()[8])


@pytest.fixture(scope="module")
def hosts() -> Iterator[list[Host]]:
    """Both hosts and the cable; skips where this user may not lay one."""
    clear()  # what a test that was killed left
    try:
        for host in HOSTS:
            ip(f"netns add {host}")
        ip(f"link add fta netns {HOSTS[0]} type veth peer ftb netns {HOSTS[1]}")
    except (OSError, subprocess.CalledProcessError):
        clear()
        pytest.skip("network namespaces need root and iproute2")
    names = "".join(f"{address} {host}\n" for address, host in zip(ADDRESSES, HOSTS, strict=True))
    for host, address, device in zip(HOSTS, ADDRESSES, DEVICES, strict=True):
        folder_of(host).mkdir(parents=True, exist_ok=True)
        (folder_of(host) / "hosts").write_text("127.0.0.1 localhost\n" + names)
        ip(f"-n {host} addr add {address}/24 dev {device}")
        for each in (device, "lo"):
            ip(f"-n {host} link set {each} up")
        limit = f"tc qdisc add dev {device} root tbf rate 1gbit burst 256kb latency 400ms"
        ip(f"netns exec {host} {limit}")
    made = [Host(number) for number in range(2)]
    yield made
    for each in made:
        each.machine.communicate()  # which closes its input
    clear()
    for host in HOSTS:
        shutil.rmtree(folder_of(host))


def folder_of(host: str) -> Path:
    return Path("/etc/netns") / host


def ip(words: str) -> None:
    subprocess.run(["ip", *words.split()], check=True, capture_output=True)


def clear() -> None:
    for host in HOSTS:
        with contextlib.suppress(FileNotFoundError, subprocess.CalledProcessError):
            ip(f"netns del {host}")


@pytest.mark.slow
def test_a_lost_host_ends_the_other_and_both_resume(run_of, tmp_path, hosts):
    straight, run = run_of(**SECTIONS), Run(tmp_path / "run")
    words = [
        str(straight.recipe), "--backend", "fsdp_full_shard", "--processes", "2", "--precision",
        "fp32", "--output", str(run.root), "--timeout", str(TIMEOUT_SECONDS / 60), "--resume",
        "auto",
    ]  # fmt: skip
    first, second = (host.launch(words, tmp_path) for host in hosts)
    wait_for(lambda: (run.newest() or 0) >= 5, first)
    ip(f"-n {HOSTS[1]} link set ftb down")  # nobody hears of the end
    hosts[1].lose()
    hosts[1].boot()  # while the first host still waits
    second.communicate()
    _, told = first.communicate(timeout=TIMEOUT_SECONDS + 60)
    assert first.returncode == 1, told
    assert "Traceback" not in told, told
    assert f"on {HOSTS[1]}) no longer responds" in told
    assert "the last complete checkpoint is that of step" in told
    assert run.steps()[-1] < 30
    ip(f"-n {HOSTS[1]} link set ftb up")
    again = [host.launch(words, tmp_path) for host in hosts]
    outputs = [process.communicate(timeout=300) for process in again]
    assert [process.returncode for process in again] == [0, 0], outputs
    assert apart(run, straight) < FP32
    assert run.final.exists()


FIRST, LAST = 3, 11
"""Steps between which bytes are counted."""
RARELY = {"every": 100}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "here", "axis"),
    [
        ("ddp", 1, "shard"),
        ("fsdp_full_shard", 1, "shard"),
        ("hsdp", 2, "replicate"),
        ("zero3", 1, "shard"),
        ("pp", 1, "pipeline"),
    ],
)
def test_what_crosses_a_cable_is_what_the_plan_says(tiny, tmp_path, hosts, backend, here, axis):
    """Every process of a host sends so much to the other host."""
    # ZeRO-3 keeps tensors of fewer than 100,000 elements on every process.
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 2,
             "num_attention_heads": 8, "num_key_value_heads": 8}  # fmt: skip
    model = {"name": str(tiny.other(tmp_path / "model", "llama", **sizes))}
    fields = tiny.fields(model=model, max_steps=LAST + 3, saving=RARELY, evaluation=RARELY)
    recipe, run = write_recipe(tmp_path / "recipe.json", fields), Run(tmp_path / "run")
    words = [str(recipe), "--backend", backend, "--processes", str(2 * here), "--precision"]
    words += ["fp32", "--output", str(run.root), "--no-plot"]
    processes = [host.launch(words, tmp_path) for host in hosts]
    counted = list[list[int]]()
    for step in (FIRST, LAST):
        wait_for(lambda step=step: steps_made(run) >= step, processes[0])
        counted.append([host.sent() for host in hosts])
    told = [process.communicate() for process in processes]
    assert [process.returncode for process in processes] == [0, 0], told
    planned = here * read(run.plan)["prediction"]["sent"][axis]
    if backend == "zero3":  # gloo's reduce-scatter, a third of it, is an all-reduce (torch 2.13)
        planned *= 4 / 3
    each = [(after - before) / (LAST - FIRST) for before, after in zip(*counted, strict=True)]
    assert each == pytest.approx([planned, planned], rel=0.05)
