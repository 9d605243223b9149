"""Files that are submitted, read by the parsers of the engines: `make test-engines`."""

import json
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
SHARED = ("llama3_1_8b_full", "--backend", "fsdp_full_shard", "--dry-run", "cluster.nodes=2",
          "cluster.gpus=8", "cluster.gpu=H100-80", "cluster.cores=16", "cluster.host_ram=200",
          "cluster.environment.KEY=value", "--launcher")  # fmt: skip


def described(*words: str) -> str:
    """What would be submitted, by the toolkit's own environment."""
    command = [str(ROOT / ".venv" / "bin" / "python"), "-m", "finetune", "launch", *SHARED, *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_skypilot_reads_every_field(tmp_path):
    sky = pytest.importorskip("sky")
    path = tmp_path / "task.yaml"
    path.write_text(described("skypilot", "cluster.runs=/runs", "cluster.mounts./runs=s3://bucket"))
    task = sky.Task.from_yaml(str(path))
    (resources,) = task.resources
    assert (task.num_nodes, resources.accelerators) == (2, {"H100": 8})
    assert resources.job_recovery["recover_on_exit_codes"] == [75]
    assert json.loads(task.envs["FINETUNE_RECIPE"])["method"] == "sft"
    path.write_text(path.read_text().replace("use_spot", "use_spots"))
    with pytest.raises(ValueError, match="use_spots"):
        sky.Task.from_yaml(str(path))


def test_kubeflow_reads_every_field():
    """Its models drop what they do not know: what they write again is compared."""
    models = pytest.importorskip("kubeflow_trainer_api.models")
    text = described("kubernetes", "cluster.image=image", "cluster.claim=disk", "cluster.secret=s")
    objects = list(yaml.safe_load_all(text))
    assert [each["kind"] for each in objects] == ["TrainingRuntime", "TrainJob"]
    for each in objects:
        kind = getattr(models, f"TrainerV1alpha1{each['kind']}")
        assert kind.from_dict(each).to_dict() == each
