"""Tasks of lm-evaluation-harness on a loaded model; without the harness, what installs it."""

import importlib.util
import json
from pathlib import Path

import datasets
import huggingface_hub
import pytest
from datasets import DatasetInfo, Features, SplitDict, SplitInfo, Value
from datasets.arrow_writer import ArrowWriter
from tiny_run import lora_run

from finetune.cli import main as cli
from finetune.errors import FinetuneError
from finetune.evaluation.tasks import find_tasks, task_measures
from finetune.inference.generate import generate, load

HERE = importlib.util.find_spec("lm_eval") is not None
TASK = """
task: words
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: []}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
"""


@pytest.mark.skipif(HERE, reason="the harness is installed")
def test_without_the_harness_its_extra_is_named(capsys):
    assert cli.main(["eval", "anything", "--tasks", "arc_easy"]) == 2
    wanted = "--tasks: needs lm-evaluation-harness: pip install 'lm-eval[hf]>=0.4.13'"
    assert wanted in capsys.readouterr().err


@pytest.mark.skipif(not HERE, reason="needs lm-evaluation-harness")
def test_a_local_task_is_asked_as_generate_asks(tmp_path):
    loaded = load(lora_run(tmp_path).run)
    asked = ["one", "two", "three"]
    said = generate(loaded, [[{"role": "user", "content": word}] for word in asked], 8)
    rows = [{"question": q, "answer": a} for q, a in zip(asked, [*said[:2], "no"], strict=True)]
    data, task = tmp_path / "rows.jsonl", tmp_path / "words.yaml"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    task.write_text(TASK.format(data=data))
    chats, text = tmp_path / "chats.yaml", TASK.format(data=data)
    for old, new in (
        ("task: words", "task: chats"), ("generate_until", "loglikelihood"),
        ("metric: exact_match", "metric: acc"), ("generation_kwargs: {until: []}\n", ""),
    ):  # fmt: skip
        text = text.replace(old, new)
    chats.write_text(text)
    tasks = find_tasks([str(task), str(chats)], None, 8, 2)
    (measure,), notes = task_measures(loaded, tasks)
    assert (measure.name, measure.of_rows.tolist()) == ("words/exact_match", [1, 1, 0])
    (note,) = notes
    assert note.startswith("chats: not reported")
    with loaded.model.disable_adapter():
        (before,), _ = task_measures(loaded, tasks)
    assert before.total < measure.total
    with pytest.raises(FinetuneError, match="there is no task 'wrods'; did you mean 'words'"):
        find_tasks([str(task), "wrods"], None, 8, 2)
    with pytest.raises(FinetuneError, match="not a task of the harness"):
        find_tasks([str(data.with_suffix(".yaml"))], None, 8, 2)
    task.write_text(TASK.format(data=data).replace("question}}", "no.such}}"))
    with pytest.raises(FinetuneError, match="UndefinedError: 'no' is undefined"):
        task_measures(loaded, find_tasks([str(task)], None, 8, 2))


def cache_gsm8k(cache: Path, answers: list[str]) -> None:
    """A data set in the layout of the cache of `datasets`, as after a download."""
    folder = cache / "openai___gsm8k" / "main" / "0.0.0" / ("a" * 40)
    folder.mkdir(parents=True)
    features, splits = Features(question=Value("string"), answer=Value("string")), SplitDict()
    for split in ("train", "test"):
        writer = ArrowWriter(path=str(folder / f"gsm8k-{split}.arrow"), features=features)
        for number, answer in enumerate(answers):
            writer.write({"question": f"What is {number}?", "answer": answer})
        rows, size = writer.finalize()
        splits.add(SplitInfo(split, size, rows, dataset_name="gsm8k"))
    DatasetInfo(
        features=features, splits=splits, builder_name="parquet", dataset_name="gsm8k",
        config_name="main", version="0.0.0",
    ).write_to_directory(str(folder))  # fmt: skip


@pytest.mark.slow
@pytest.mark.skipif(not HERE, reason="needs lm-evaluation-harness")
def test_a_published_task_runs_offline_from_the_cache(tmp_path, monkeypatch):
    loaded = load(lora_run(tmp_path / "run").run)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    tasks = find_tasks(["gsm8k"], 2, 8, 2)
    with pytest.raises(FinetuneError) as refused:
        task_measures(loaded, tasks)
    told = str(refused.value)
    assert "'openai/gsm8k'" in told
    assert f"it is not in the cache, {tmp_path / 'cache'}." in told
    assert "set HF_DATASETS_CACHE" in told
    cache_gsm8k(tmp_path / "cache", [f"#### {n}" for n in range(6)])
    measures, notes = task_measures(loaded, tasks)
    filters = ("strict-match", "flexible-extract")
    assert [each.name for each in measures] == [f"gsm8k/exact_match/{name}" for name in filters]
    assert {len(measure.of_rows) for measure in measures} == {2}
    assert notes == []
