"""A real pretrained model learns from real data."""

from conftest import losses


def test_one_process_learns_grade_school_maths(assets, run_of):
    """stories260K after ten LoRA steps on GSM8K."""
    data = {"format": "question_answer"}
    fields = {
        "method": "sft",
        "model": {"name": str(assets / "models/stories260K"), "chat_template": "plain"},
        "data": [data | {"source": str(assets / "data/gsm8k/train.jsonl"), "first": 400}],
        "eval_data": [data | {"source": str(assets / "data/gsm8k/test.jsonl"), "first": 24}],
        "adapter": {"r": 8},
        "batch": {"rows": 8, "micro_rows": 4, "max_length": 192, "overlong": "truncate"},
        "optim": {"lr": 5e-3, "warmup": 2}, "evaluation": {"every": 5}, "max_steps": 10,
    }  # fmt: skip
    run = run_of(fields=fields)
    assert losses(run)[0] > 6
    assert losses(run, "eval")[-1] < 4.5
