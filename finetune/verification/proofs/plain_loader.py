"""Load results as any user would: with transformers and PEFT only, in a separate process.

    python plain_loader.py < TASKS.json > ANSWERS.json

Run as a script, never imported: it must not use this package. A task is a mapping:

    base          folder or name of the base model, null for a complete model
    revision, quantization ("none" | "nf4" | "int8"), bf16: how the base was loaded in training
    result        folder of the adapter or of the complete model
    merged        folder of the merged model, or null
    rows          [[ids, trained], ...]: rows of token ids, and which of them have a loss
    scores        null, or fields of config.json for a model with a score head: then the loss is the
                  mean score
    pixels        null, or a file with the inputs for the images of each row: ROW.NAME
    limit         null, or the maximum tokens of a completion: then rows are prompts, which are
                  completed greedily up to the token id `eos`

An answer is {"loss": mean loss over the rows, "completions": null or ids of each, "difference":
largest difference between the logits of `result` and `merged` in fp32 relative to the largest
logit, "tensors": their number, "problems": []}.
"""

import contextlib
import json
import sys
from pathlib import Path

import torch
from peft import AutoPeftModelForCausalLM, PeftModel, get_peft_model_state_dict
from peft import AutoPeftModelForSequenceClassification as AutoPeftModelForScores
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BitsAndBytesConfig,
)
from transformers.utils import logging


def answer(task):
    result = Path(task["result"])
    shapes = stored(result)
    problems = [f"{result}: {name} is empty" for name, shape in shapes.items() if 0 in shape]
    loss = completions = difference = None
    try:
        AutoTokenizer.from_pretrained(task["merged"] or result)
        measure = mean_loss if task["scores"] is None else mean_score
        task["rows"] = with_images(task)
        model = open_as_trained(task, problems)
        if task["limit"] is None:
            loss = measure(model, task["rows"])
        else:
            completions = [complete(model, ids, task) for ids, _, _ in task["rows"]]
        if task["merged"] is not None:
            merged = whole(task, task["merged"], torch.float32, problems)
            difference = compare(open_unquantised(task), merged, task["rows"])
    except (RuntimeError, OSError, ValueError) as error:
        problems.append(f"{result}: cannot be loaded: {' '.join(str(error).split())[:300]}")
    return {
        "loss": loss,
        "completions": completions,
        "difference": difference,
        "tensors": len(shapes),
        "problems": problems,
    }


def with_images(task):
    """Rows with the inputs for their images; `mm_token_type_ids` and others have a batch of one."""
    inputs = [{} for _ in task["rows"]]
    for key, tensor in (load_file(task["pixels"]) if task["pixels"] else {}).items():
        row, _, name = key.partition(".")
        inputs[int(row)][name] = tensor
    return [(*row, given) for row, given in zip(task["rows"], inputs, strict=True)]


def stored(folder):
    """Shape of every tensor in a folder's weight files."""
    shapes = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            shapes |= {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    return shapes


def open_as_trained(task, problems):
    """The result on its base, loaded as in training."""
    dtype = torch.bfloat16 if task["bf16"] else torch.float32
    if task["base"] is None:
        return whole(task, task["result"], dtype, problems)
    quantised = None
    if task["quantization"] == "nf4":
        quantised = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=dtype,
        )
    elif task["quantization"] == "int8":
        quantised = BitsAndBytesConfig(load_in_8bit=True)
    base = auto(task).from_pretrained(
        task["base"],
        **numbered(task["scores"] or {}),
        revision=task["revision"] or "main",
        dtype=dtype,
        quantization_config=quantised,
    )
    # bitsandbytes 0.50 repacks NF4 weights on CPUs with AVX512-BF16 for a kernel that sums in bf16.
    for layer in base.modules():
        if type(layer).__name__ == "Linear4bit":
            layer.support_avx512bf16_for_cpu = False
    model = PeftModel.from_pretrained(base, task["result"])
    wanted = get_peft_model_state_dict(model, save_embedding_layers=False)
    there = stored(Path(task["result"]))
    missing = [name for name in wanted if name not in there]
    problems += [f"{task['result']}: {name} is missing" for name in missing]
    untouched = [n for n, t in wanted.items() if "lora_B" in n and not t.any()]
    problems += [f"{task['result']}: {name} is all zeros: never trained" for name in untouched]
    return model.eval()


def open_unquantised(task):
    if task["base"] is None:
        return auto(task).from_pretrained(task["result"], dtype=torch.float32).eval()
    if task["pixels"]:  # PEFT 0.21 has no class for them
        base = auto(task).from_pretrained(task["base"], dtype=torch.float32)
        return PeftModel.from_pretrained(base, task["result"]).eval()
    kind = AutoPeftModelForCausalLM if task["scores"] is None else AutoPeftModelForScores
    given = numbered(task["scores"] or {})
    return kind.from_pretrained(task["result"], dtype=torch.float32, **given).eval()


def auto(task):
    if task["pixels"]:
        return AutoModelForImageTextToText
    return AutoModelForCausalLM if task["scores"] is None else AutoModelForSequenceClassification


def numbered(fields):
    """Fields of a config.json, with the keys of `id2label`, which are strings in JSON, as ints."""
    names = fields.get("id2label")
    return (
        fields if names is None else {**fields, "id2label": {int(n): v for n, v in names.items()}}
    )


def whole(task, folder, dtype, problems):
    model, info = auto(task).from_pretrained(
        folder, dtype=dtype, output_loading_info=True, ignore_mismatched_sizes=True
    )
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        problems += [f"{folder}: {kind.split('_')[0]} {name}" for name in sorted(info[kind])]
    return model.eval()


@torch.inference_mode()
def mean_loss(model, rows):
    """Mean cross-entropy over the trained tokens of all rows, one row at a time."""
    total, terms = 0.0, 0
    for ids, trained, images in rows:
        labels = torch.tensor([i if t else -100 for i, t in zip(ids, trained, strict=True)][1:])
        given = torch.tensor([ids])
        logits = (
            model(input_ids=given, **images, use_cache=False).logits[0, :-1].float()
        )  # (tokens - 1, vocab)
        total += torch.nn.functional.cross_entropy(logits, labels, reduction="sum").item()
        terms += int((labels != -100).sum())
    return total / max(1, terms)


@torch.inference_mode()
def mean_score(model, rows):
    """Mean of all scores of all rows, one row at a time."""
    inputs = (torch.tensor([ids]) for ids, _, _ in rows)
    found = [model(input_ids=each, use_cache=False).logits.float().mean().item() for each in inputs]
    return sum(found) / max(1, len(found))


@torch.inference_mode()
def complete(model, prompt, task):
    """Token ids of the greedy completion, including the stop token."""
    ends = model.generation_config.eos_token_id
    ends = {task["eos"], *(ends if isinstance(ends, list) else [ends])}
    ids = list(prompt)
    for _ in range(task["limit"]):
        logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits
        ids.append(logits[0, -1].argmax().item())
        if ids[-1] in ends:
            break
    return ids[len(prompt) :]


@torch.inference_mode()
def compare(first, second, rows):
    worst = 0.0
    for ids, _, images in rows:
        given = {"input_ids": torch.tensor([ids]), **images, "use_cache": False}
        a, b = (m(**given).logits.float() for m in (first, second))
        worst = max(worst, ((a - b).abs().max() / a.abs().max()).item())
    return worst


if __name__ == "__main__":
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    tasks = json.load(sys.stdin)
    with contextlib.redirect_stdout(sys.stderr):
        answers = [answer(task) for task in tasks]
        assert not any(name.split(".")[0] == "finetune" for name in sys.modules)
    json.dump(answers, sys.stdout)
