"""Conversations with added tokens, and their loss in plain transformers."""

import json
from pathlib import Path
from typing import Any

import torch
from conftest import Tiny
from transformers import AutoModelForCausalLM

CLOSE = 1e-5
"""Between losses in fp32 whose sums are in another order."""
ADDED = ["<think>", "</think>", " a b"]


def plain(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def thinking(tiny: Tiny, folder: Path) -> dict[str, Any]:
    """Data in which the answers have the added tokens."""
    files = {}
    for name, source in (("data", tiny.data), ("eval_data", tiny.eval_data)):
        rows = [json.loads(line) for line in source.read_text().splitlines()]
        for row in rows:
            row["messages"][1]["content"] = f"<think>{row['messages'][0]['content']}</think> a b"
        path = folder / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        files[name] = [{"source": str(path), "format": "messages"}]
    return files


def conversation_loss(model: Any, tokenizer: Any, data: list[dict[str, Any]]) -> float:
    """Mean loss of the answers of all rows: of the words and the end of the turn."""
    total = count = 0
    for line in Path(data[0]["source"]).read_text().splitlines():
        messages = json.loads(line)["messages"]
        text = tokenizer.apply_chat_template(messages, tokenize=False)
        asked = tokenizer.apply_chat_template(
            messages[:-1], tokenize=False, add_generation_prompt=True
        )
        ids = tokenizer(text.rstrip("\n"), add_special_tokens=False).input_ids
        start = len(tokenizer(asked, add_special_tokens=False).input_ids)
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([ids])).logits[0, start - 1 : -1].float()
        labels = torch.tensor(ids[start:])
        total += torch.nn.functional.cross_entropy(logits, labels, reduction="sum").item()
        count += len(labels)
    return total / count
