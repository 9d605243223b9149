"""Jobs on a real SLURM: preempted, out of time, without a node, cancelled; nothing is lost."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import slurm as clusters
from conftest import FP32, Finetune, apart, start, warm_python, write_recipe
from faulty import steps_made
from slurm import Slurm, curve, files_of, preempted

from finetune.launchers.slurm import STATES
from finetune.runs.attempts import cost
from finetune.runs.run import Run

SECTIONS = {"max_steps": 100, "saving": {"every": 20}, "evaluation": {"every": 100}}
LONG = SECTIONS | {"max_steps": 240, "saving": {"every": 80}, "batch": {"rows": 4}}
"""More steps than a job makes while `finetune stop` starts."""
WORDS = ("--backend", "fsdp_full_shard", "--precision", "fp32", "--no-plot")


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    if (reason := clusters.missing()) is not None:
        pytest.skip(reason)
    with clusters.running(tmp_path_factory.mktemp("slurm") / "it") as made:
        # Each start of `python tests/slurm.py` loads its libraries; here they are loaded once.
        made.python = warm_python()
        yield made


@pytest.fixture(autouse=True)
def no_job_stays(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "slurm" in request.fixturenames:
        request.getfixturevalue("slurm").ask("scancel", "--user=root")


@pytest.fixture
def recipe(tiny, tmp_path: Path) -> Path:
    return write_recipe(tmp_path / "recipe.json", tiny.fields(**SECTIONS))


def ended(slurm: Slurm, job: str) -> str:
    """Wait for the end of a job, and return its state."""
    slurm.wait(lambda: STATES.get(slurm.state(job), "ended") == "ended", 600)
    return slurm.state(job)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["cluster.partition=nope"], "invalid partition specified: nope; allocation failure"),
        (["cluster.partition=owned", "cluster.account=other"], "never start: Job's account not"),
        (["cluster.partition=short", "cluster.hours=2"], "would never start: Partition"),
    ],
)
def test_what_slurm_cannot_run_is_refused_and_leaves_nothing(
    slurm, finetune: Finetune, recipe, tmp_path, words, told
):
    run = tmp_path / "run"
    done = finetune(
        "launch", recipe, *WORDS, "--output", run, "--launcher", "slurm", "cluster.nodes=2", *words,
        env=slurm.env,
    )  # fmt: skip
    assert told in done.refused()
    assert "partitions here: low (2 nodes, 2 cores" in done.stderr
    assert not run.exists()
    assert slurm.ask("squeue", "--noheader") == ""


def test_a_queued_job_has_its_name_and_is_cancelled(slurm, finetune, recipe, tmp_path):
    blocking = slurm.ask(
        "sbatch", "--parsable", "--exclusive", "--nodes=2", "--output=/dev/null", "--wrap=sleep 99"
    )
    run = tmp_path / "run"
    job = slurm.submit(finetune, recipe, *WORDS, "--output", run, "--name", "mine")
    listed = json.loads(finetune("runs", tmp_path, "--json", env=slurm.env).passed().stdout)
    assert [(each["run"], each["job"]) for each in listed] == [(str(run), job)]
    assert listed[0]["state"].startswith("queued (")
    again = [recipe, *WORDS, "--launcher", "slurm", "cluster.nodes=2", "--name", "mine"]
    taken = finetune("launch", *again, "--output", tmp_path / "other", env=slurm.env).refused()
    assert taken == (
        f"error: job name 'mine': taken by job {job} (PENDING); give another with --name\n"
    )
    same = finetune("launch", *again, "--output", run, env=slurm.env).refused()
    assert f"{run}: its job {job} is queued; end it with finetune stop {run}" in same
    told = finetune("stop", run, env=slurm.env).passed().stdout
    assert told == f"job {job} of SLURM is cancelled\n"
    assert slurm.state(job) in ("", "CANCELLED")
    slurm.ask("scancel", blocking)
    ended(slurm, blocking)


@pytest.mark.slow
def test_a_run_out_of_time_preempted_and_stopped_ends_as_if_it_never_was(
    slurm, run_of, finetune, tiny, tmp_path, session_cache
):
    """Under a limit of two minutes, the first start saves at once, to measure a save."""
    recipe = write_recipe(tmp_path / "recipe.json", tiny.fields(**LONG))
    straight, run = run_of("fsdp_full_shard", **LONG), Run(tmp_path / "run")
    words = [recipe, *WORDS, "--output", run.root]
    limit = ["cluster.hours=0.0333", "cluster.signal_seconds=10"]
    job = slurm.submit(finetune, *words, *limit)
    slurm.wait(lambda: steps_made(run) > 0 and slurm.state(job) == "PENDING")
    assert "interrupted by the time limit after step" in run.log.read_text()
    assert len(preempted(slurm, run, job, times=1, seed=1, longest=0.5)) == 1
    watching = start(["watch", str(run.root)], session_cache, warm=True, **slurm.env)
    before = steps_made(run)
    slurm.wait(lambda: steps_made(run) > before)
    told = finetune("stop", run.root, env=slurm.env).passed().stdout
    assert told == f"job {job} of SLURM was asked to save and end\n"
    assert ended(slurm, job) == "FAILED"
    shown, _ = watching.communicate(timeout=60)
    assert watching.returncode == 75
    assert "saved step-" in shown
    assert run.newest() < 240
    job = slurm.submit(finetune, *words, "--resume")
    assert ended(slurm, job) == "COMPLETED", run.log.read_text()
    assert curve(run) == curve(straight)
    assert files_of(run) == files_of(straight)
    found = cost(run)
    assert (found.attempts, found.lost_steps) == (4, 0), run.attempts.read_text()


@pytest.mark.slow
def test_a_run_whose_node_dies_goes_on_with_the_nodes_that_are_there(
    slurm, run_of, finetune, recipe, tmp_path
):
    straight, run = run_of(**SECTIONS), Run(tmp_path / "run")
    elastic = ["--processes", "auto", "--min-machines", "1"]
    job = slurm.submit(finetune, recipe, *WORDS, *elastic, "--output", run.root)
    slurm.wait(lambda: (run.newest() or 0) >= 20)
    slurm.lose_node(clusters.NODES[1])
    assert ended(slurm, job) == "COMPLETED", run.log.read_text()
    slurm.bring_back(clusters.NODES[1])
    log = run.log.read_text()
    assert "elastic      2 of 2 machines, 2 of 2 devices: 8 rows a step as always, 2" in log
    assert (
        "elastic      1 of 1 machines, 1 of 1 devices: 8 rows a step as always, 4 micro-batches on "
        "each; backend single" in log
    )
    assert [each["processes"] for each in run.read_metrics("start")] == [2, 1]
    assert apart(run, straight) < FP32


@pytest.mark.slow
def test_a_job_that_makes_no_progress_is_not_started_for_ever(slurm, finetune, recipe, tmp_path):
    run = Run(tmp_path / "run")
    # Machine 0 is refused at once; the other one waits for it as long as this.
    words = [recipe, *WORDS, "--output", run.root, "--join-timeout", "0.1"]
    job = slurm.submit(finetune, *words, "cluster.attempts=1")
    slurm.wait(lambda: run.attempts.exists() and '"start"' in run.attempts.read_text())
    slurm.kill_job()
    assert ended(slurm, job) == "FAILED"
    assert "started 1 times from step 0 without reaching another" in run.log.read_text()
