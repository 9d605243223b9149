"""A line of the ranking says what the page of its own backend says."""

import json

import pytest
from conftest import slow_but

from finetune.cli.main import main

JOBS = (
    "llama3_1_8b_dpo adapter=null --gpu H100-80 --gpus 8",
    "llama3_1_8b_dpo --gpu RTX4090 --gpus 4 --precision fp32",
    "qwen3_0_6b_reward --gpu A100-40 --gpus 2",
    "qwen3_0_6b_orpo --gpu L4 --gpus 8 --nodes 2",
    "qwen3_0_6b_kto --gpu RTX4090 --gpus 2",
    "qwen3_8b_full --gpu H100 --gpus 16 --nodes 2",
    "llama3_1_8b_qlora --gpu L4 --gpus 4",
    "qwen3_0_6b_distill --gpu H100 --gpus 8",
    "llama3_3_70b_lora --gpu H200 --gpus 8",
    "qwen3_0_6b_classifier --gpu L4 --gpus 4",
    "qwen3_0_6b_grpo model.name=Qwen/Qwen3-8B --gpu RTX4090 --gpus 2",
    "qwen3_0_6b_grpo --gpu A100-40 --gpus 8",
    "llama3_1_8b_lora model.activation_checkpointing=offload --gpu A100-40 --gpus 2",
    "qwen3_0_6b_lora batch.packing=true --gpu T4 --gpus 2 --precision fp16",
    "qwen3_0_6b_full model.name=Qwen/Qwen3-30B-A3B --gpu H200 --gpus 8",
)


def planned(capsys, job: str, *words: str):
    assert main(["plan", *job.split(), *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("job", slow_but(JOBS[::5], JOBS))
def test_a_line_of_the_ranking_is_that_of_its_page(capsys, job):
    lines = planned(capsys, job)["options"]
    assert lines
    for line in lines[:: max(1, len(lines) // 12)]:
        words = [f"batch.micro_rows={line['micro_rows']}", "batch.micro_tokens=null"]
        words += [f"--{axis}={size}" for axis, size in line["axes"].items()]
        kept = {"none": "false", "full": "true"}.get(line["checkpointing"], line["checkpointing"])
        words += [f"model.activation_checkpointing={kept}", "--backend", line["backend"]]
        page = planned(capsys, job, *words)
        memory, time = page["prediction"]["memory"], page["prediction"]["time"]
        (peak,) = (each for each in memory["moments"] if each["name"] == memory["peak"])
        assert peak["bytes"] == pytest.approx(line["bytes"]), line
        assert (memory["status"], time["step"]) == (line["status"], pytest.approx(line["step"]))
