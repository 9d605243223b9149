"""Jobs for clusters: their settings, what is submitted, what they cost; runs that are followed."""

import json
import os
import time
from pathlib import Path

import pytest
import yaml
from conftest import Finetune, copy_of, problems_of, start, wait_for, write_recipe

from finetune import catalog
from finetune.launchers import cluster, elastic, variables
from finetune.launchers.slurm import Slurm
from finetune.runs import attempts
from finetune.runs.metrics import Saved, Trained
from finetune.runs.run import Run, write_json
from finetune.training.time_limit import TimeLimit


@pytest.fixture
def recipe(tiny, tmp_path: Path) -> Path:
    return write_recipe(tmp_path / "recipe.json", tiny.fields())


def test_a_cluster_is_found_beside_the_recipe_and_overridden_like_a_recipe(tmp_path):
    (tmp_path / "clusters").mkdir()
    file = tmp_path / "clusters" / "big.yaml"
    file.write_text("partition: a100\nhours: 12\nenvironment: {NCCL_DEBUG: WARN}\n")
    assert cluster.find("big", tmp_path / "recipe.json") == file
    words, settings = cluster.split(["optim.lr=1e-4", "cluster.qos=now", "cluster.hours=0.5"])
    assert words == ["optim.lr=1e-4"]
    assert cluster.load(Slurm, file, settings) == Slurm(
        partition="a100", qos="now", hours=0.5, environment={"NCCL_DEBUG": "WARN"}
    )
    assert problems_of(cluster.load, Slurm, file, ["partitio=x", "nodes=0", "hours.x=1"]) == (
        "cluster.hours.x: there is no such place in the recipe",
        f"{file}: nodes: Input should be greater than 0, got 0",
        f"{file}: partitio: unknown key; did you mean 'partition'?",
    )
    assert "did you mean 'big'?; known are big" in problems_of(
        cluster.find, "bigg", tmp_path / "recipe.json"
    )[0]  # fmt: skip


def submitted(finetune: Finetune, *words: str | Path) -> str:
    return finetune("launch", *words, "--dry-run").passed().stdout


def test_a_script_of_slurm_has_all_settings(finetune: Finetune, recipe, tmp_path):
    run = tmp_path / "run"
    text = submitted(
        finetune, recipe, "--launcher", "slurm", "--backend", "ddp", "--output", run,
        "--processes", "auto", "--min-machines", "1", "--name", "mine", "batch.rows=16",
        "batch.micro_rows=1", "cluster.nodes=2", "cluster.gpus=8", "cluster.gpu_type=h100",
        "cluster.cores=64", "cluster.account=us", "cluster.qos=now", "cluster.hours=1.5",
        "cluster.modules=[cuda]", "cluster.setup=[ulimit -n 9000]", "cluster.container=a.sif",
        "cluster.runtime=apptainer", "cluster.mounts=[/data:/data]", "cluster.attempts=4",
        "cluster.options=[--exclusive]", "cluster.environment.WANDB_API_KEY=secret",
    )  # fmt: skip
    assert (
        text
        == f"""\
# with WANDB_API_KEY in the environment
#!/bin/bash
#SBATCH --job-name=mine
#SBATCH --nodes=1-2
#SBATCH --gpus-per-node=h100:8
#SBATCH --cpus-per-task=64
#SBATCH --account=us
#SBATCH --qos=now
#SBATCH --time=90
#SBATCH --signal=TERM@120
#SBATCH --output={run}/job/log.txt
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --exclusive
module load cuda
ulimit -n 9000
end=$(squeue -h -j "$SLURM_JOB_ID" -o %e)
end=$(date -d "${{end:-none}}" +%s 2>/dev/null)
srun --ntasks-per-node=1 --kill-on-bad-exit=0 --cpus-per-task=64 apptainer exec --nv --bind \
/data:/data,{cwd_of(finetune)} a.sif finetune launch {run}/job/recipe.json --backend ddp \
--processes auto --output {run} --resume auto --timeout 30.0 --no-plot --max-attempts 4 \
--join-timeout 5.0 --min-machines 1 ${{end:+--end-by "$end"}}
status=$?
again=$(( status == 75 || status > 128 ))
if [ $again = 1 ] && [ ! -e {run}/job/stop ]; then
    scontrol requeue "$SLURM_JOB_ID" && exit 0
fi
exit $status

"""
    )
    assert not run.exists()


def cwd_of(finetune: Finetune) -> str:
    return finetune("--version", cwd=None) and os.path.realpath(
        finetune.__closure__[0].cell_contents
    )


def test_a_task_of_skypilot_and_a_trainjob_start_again_on_75(finetune: Finetune, recipe, tmp_path):
    shared = [recipe, "--backend", "ddp", "--output", tmp_path / "mine", "cluster.nodes=2",
              "batch.rows=16", "batch.micro_rows=1", "cluster.gpus=8", "cluster.gpu=H100-80",
              "cluster.environment.KEY=hidden"]  # fmt: skip
    sky = submitted(finetune, *shared, "--launcher", "skypilot", "cluster.runs=/runs",
                    "cluster.mounts./runs=s3://bucket")  # fmt: skip
    kubernetes = submitted(finetune, *shared, "--launcher", "kubernetes", "cluster.image=image",
                           "cluster.claim=disk")  # fmt: skip
    assert "hidden" not in sky + kubernetes
    task = yaml.safe_load(sky)
    assert task["resources"] == {
        "accelerators": "H100:8", "use_spot": True,
        "job_recovery": {"recover_on_exit_codes": [75]},
    }  # fmt: skip
    assert task["num_nodes"] == 2
    asked = "batch.rows=16 batch.micro_rows=1".split()
    expected = catalog.to_fields(catalog.resolve(recipe, asked))
    assert json.loads(task["envs"]["FINETUNE_RECIPE"]) == expected
    assert "--processes 16 --output /runs/mine --resume auto" in task["run"]
    runtime, job = yaml.safe_load_all(kubernetes)
    (node,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    rules = node["template"]["spec"]["podFailurePolicy"]["rules"]
    codes = {each["action"]: each["onExitCodes"] for each in rules if "onExitCodes" in each}
    assert {action: code["values"] for action, code in codes.items()} == {
        "Ignore": [75], "FailJob": [2]
    }  # fmt: skip
    (container,) = node["template"]["spec"]["template"]["spec"]["containers"]
    assert container["resources"] == {"limits": {"nvidia.com/gpu": "8"}}
    assert job["spec"]["trainer"] == {"numNodes": 2}


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--launcher", "slurm", "cluster.gpus=1", "cluster.gpu=RTX4090"],
         "cluster.gpus 1 of 1 nodes: it needs "),
        (["--launcher", "slurm", "cluster.nodes=2", "--processes", "3"],
         "--processes 3: not the same number on each of cluster.nodes=2"),
        (["cluster.nodes=2"], "cluster.nodes=2: of a cluster; use --launcher slurm or hosts or"),
        (["--min-machines", "2"], "--min-machines: needs --processes auto"),
        (["--launcher", "kubernetes", "cluster.image=a"], "cluster: claim: Field required"),
        (["--launcher", "slrum"], "did you mean 'slurm'?"),
    ],
)  # fmt: skip
def test_a_job_that_cannot_run_is_refused_before_it_is_queued(
    finetune: Finetune, tiny, tmp_path, words, told
):
    sizes = {"hidden_size": 4096, "num_hidden_layers": 32, "intermediate_size": 14336}
    large = {"model_type": "llama", "num_attention_heads": 32, "vocab_size": 128_000, **sizes}
    model = {"name": None, "config": large, "tokenizer": str(tiny.model)}
    recipe = write_recipe(tmp_path / "r.json", tiny.fields(model=model, backend="ddp"))
    if "cluster.gpus=1" in words:
        words = [*words, "--backend", "single"]
    run = tmp_path / "run"
    assert told in finetune("launch", recipe, "--output", run, *words).refused()
    assert not run.exists()


@pytest.mark.parametrize(
    ("devices", "machines", "rows", "found"),
    [
        (1, 1, 8, ("single", 1, [])),
        (1, 2, 8, ("ddp", 2, ["--num_machines", "2"])),
        (1, 3, 8, ("ddp", 2, ["--num_machines", "3", "--num_machines", "2"])),
        (8, 3, 64, ("ddp", 16, ["--num_machines", "3", "--num_machines", "2"])),
        (8, 3, 96, ("ddp", 24, ["--num_machines", "3"])),
        (6, 2, 16, ("ddp", 8, ["--num_machines", "2"])),
    ],
)
def test_a_start_uses_as_many_devices_as_fit_the_batch(
    monkeypatch, tiny, devices, machines, rows, found
):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(devices))))
    recipe = catalog.from_fields(tiny.fields(batch={"rows": rows, "micro_rows": 1}))
    flags = [] if machines == 1 else ["--num_machines", str(machines)]
    assert elastic.fit(recipe, "ddp", flags, "fp32") == found
    last = [*flags, "--machine_rank", str(machines - 1)]
    used = int((["1", *found[2]])[-1])
    assert (elastic.fit(recipe, "ddp", last, "fp32") is None) == (used < machines)
    assert problems_of(elastic.fit, recipe, "ddp", flags, "fp32", 4) == (
        f"--min-machines 4: only {machines} are there",
    )


@pytest.mark.parametrize(
    ("known", "place"),
    [
        ({"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "node-0",
          "PET_MASTER_PORT": "29400"}, ["1", "node-0", "29400"]),
        ({"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1",
          "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2"}, ["1", "10.0.0.1", "20000"]),
    ],
)  # fmt: skip
def test_a_machine_finds_its_place_in_the_variables_of_its_scheduler(monkeypatch, known, place):
    for name, value in known.items():
        monkeypatch.setenv(name, value)
    assert variables.flags([]) == [
        "--num_machines", "2", "--machine_rank", place[0], "--main_process_ip", place[1],
        "--main_process_port", place[2],
    ]  # fmt: skip


def lines(run: Run, *events: dict) -> None:
    run.root.mkdir(exist_ok=True)
    run.attempts.write_text("".join(json.dumps(event) + "\n" for event in events))


def test_the_cost_of_a_run_is_the_time_of_its_starts(run_of, tmp_path):
    """Of three starts, the second was killed 30 s after it began, two steps after a checkpoint."""
    run = copy_of(run_of(), tmp_path / "run")
    steps = list(run.read_metrics("train"))[:2]
    records = [each | {"time": 1130.0, "seconds": 20.0} for each in steps]
    run.metrics.write_text("".join(json.dumps(each) + "\n" for each in records))
    write_json(run.job, {"price": 3.0, "devices": 4})
    lines(
        run, {"event": "submit", "time": 1000},
        {"event": "start", "checkpoint": 0, "step": 0, "time": 1010},
        {"event": "end", "status": 75, "time": 1060},
        {"event": "start", "checkpoint": 5, "step": 5, "time": 1100},
        {"event": "start", "checkpoint": 5, "step": 7, "time": 1150},
        {"event": "end", "status": 0, "time": 1170},
    )  # fmt: skip
    assert attempts.cost(run) == attempts.Cost(
        attempts=3, waiting=10 + 40 + 20, allocated=50 + 30 + 20, stepping=0.4, lost_steps=2,
        price=3.0 * 4 * 100 / 3600,
    )  # fmt: skip


def test_starts_without_a_new_checkpoint_are_counted_from_the_last_submission(tmp_path):
    run = Run(tmp_path / "run")
    start = {"event": "start", "checkpoint": 0, "step": 0, "time": 1}
    preempted, late = ({"event": "end", "status": 75, "late": late} for late in (False, True))
    lines(run, start, start, {"event": "submit", "time": 2}, start, late, *[start, preempted] * 9)
    with attempts.attempt(run, most=2):
        pass
    with pytest.raises(Exception, match="started 2 times from step 0 without reaching another"):
        attempts.attempt(run, most=2).__enter__()
    attempts.submitted(run)
    with attempts.attempt(run, most=1):
        pass


def test_a_run_saves_before_its_limit_by_what_its_steps_and_saves_took(tmp_path):
    limit = TimeLimit(Run(tmp_path), time.time() + 100)
    assert not TimeLimit(Run(tmp_path), None).reached(0)
    assert not limit.reached(39)  # 2 x 39 + 20 s
    assert limit.reached(41)
    assert limit.reached(0)  # 2 x 60 s, before one is measured
    limit.listen(Saved(step=1, seconds=10.0, bytes=1))
    assert not limit.reached(0)
    names = "loss grad_norm lr trained_tokens real_tokens slots tokens_per_second memory epoch"
    step = dict.fromkeys(names.split(), 0)
    limit.listen(Trained(step=1, seconds=31.0, **step))
    assert limit.reached(0)  # 2 x 31 + 2 x 10 + 20 s


def test_a_run_here_is_listed_followed_and_stopped(
    finetune: Finetune, tiny, tmp_path, session_cache
):
    fields = tiny.fields(max_steps=100_000, saving={"every": 100_000}, evaluation={"every": 50_000})
    run = Run(tmp_path / "runs" / "mine")
    words = ["train", str(write_recipe(tmp_path / "r.json", fields)), "--precision", "fp32"]
    process = start([*words, "--output", str(run.root), "--no-plot"], session_cache, warm=True)
    wait_for(lambda: sum(1 for _ in run.read_metrics("train")) > 3, process)
    (listed,) = json.loads(finetune("runs", tmp_path / "runs", "--json").passed().stdout)
    assert (listed["run"], listed["state"], listed["steps"]) == (str(run.root), "running", 100_000)
    assert listed["step"] > 3
    assert listed["seconds_left"] > 10
    watching = start(["watch", str(run.root)], session_cache, warm=True)
    assert watching.stdout.readline()  # the table of the start
    told = finetune("stop", run.root).passed().stdout.splitlines()
    step = run.newest()
    assert told[0].startswith(f"{run.root}: process ")
    assert told[1:] == [f"{run.root}: interrupted at step {step}"]
    process.communicate(timeout=60)
    assert process.returncode == 75
    shown, _ = watching.communicate(timeout=60)
    assert watching.returncode == 75
    assert f"saved step-{step:08d}" in shown
    assert finetune("stop", run.root).refused() == (
        f"error: {run.root}: nothing trains in it; it is interrupted\n"
    )
    table = finetune("runs", tmp_path / "runs").passed().stdout.splitlines()
    assert table[1].split()[:3] == [str(run.root), "interrupted", f"{step}/100000"]
