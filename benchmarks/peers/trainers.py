"""Contenders based on `transformers.Trainer`, each configured as in its documentation.

This runs in a peer's environment: `python -m benchmarks.peers.trainers NAME PLACE`.
"""

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, concatenate_datasets
from transformers import TrainerCallback

from benchmarks.peers.turns import Turns
from benchmarks.peers.workload import Job, Row, of_step, read_job, read_rows


class InTurn(TrainerCallback):
    """Lets a Trainer take one optimizer step per line of input."""

    def __init__(self, turns: Turns) -> None:
        self.turns = turns

    def on_train_begin(self, *_: Any, model: torch.nn.Module, **__: Any) -> None:
        self.turns.watch(model, read)
        self.turns.ready()
        self.turns.wait()

    def on_log(self, *_: Any, logs: dict[str, float], **__: Any) -> None:
        """Called at the end of a step; fetching the next batch is timed with the next step."""
        if "loss" in logs:
            self.turns.answer(logs["loss"])
            self.turns.wait()


def read(
    input_ids: torch.Tensor,
    labels: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None,
    **_: Any,  # how the loss is computed, and boundaries for kernels of GPUs
) -> dict[str, Any]:
    """The inputs of a forward pass, under the names of `turns.documents`."""
    return {"ids": input_ids, "labels": labels, "mask": attention_mask, "positions": position_ids}


def common(job: Job, place: Path) -> dict[str, Any]:
    """Arguments of every Trainer: those of the job, with saving and reporting disabled."""
    return {
        "output_dir": str(place / "out"), "max_steps": job.steps, "learning_rate": job.lr,
        "lr_scheduler_type": "constant", "per_device_train_batch_size": job.micro_rows,
        "gradient_accumulation_steps": job.rows // job.micro_rows, "bf16": True,
        "use_cpu": not job.gpu, "logging_steps": 1, "save_strategy": "no", "report_to": "none",
        "disable_tqdm": True,
    }  # fmt: skip


def adapter(job: Job) -> Any:
    from peft import LoraConfig

    return LoraConfig(
        task_type="CAUSAL_LM", r=job.r, lora_alpha=job.alpha, target_modules="all-linear"
    )


def dataset(rows: list[Row]) -> Dataset:
    columns = {"input_ids": [ids for ids, _ in rows], "labels": [labels for _, labels in rows]}
    columns["attention_mask"] = [[1] * len(ids) for ids, _ in rows]
    return Dataset.from_dict(columns)


def trainer_peft(job: Job, place: Path, turn: InTurn) -> None:
    """The Trainer of transformers with PEFT; rows are padded to the longest in their batch."""
    _trainer(job, place, turn, "sequential")


def trainer_grouped(job: Job, place: Path, turn: InTurn) -> None:
    """The same with rows of similar length in a step: other rows per step, the same per epoch."""
    _trainer(job, place, turn, "group_by_length")


def _trainer(job: Job, place: Path, turn: InTurn, sampling: str) -> None:
    from transformers import AutoTokenizer, DataCollatorForSeq2Seq, Trainer, TrainingArguments

    arguments = TrainingArguments(train_sampling_strategy=sampling, **common(job, place))
    Trainer(
        network(job, place),
        arguments,
        data_collator=DataCollatorForSeq2Seq(AutoTokenizer.from_pretrained(place / "model")),
        train_dataset=dataset(read_rows(place)),
        callbacks=[turn],
    ).train()


def network(job: Job, place: Path) -> Any:
    """A model in fp32 if all weights are trained (with autocast to bf16), otherwise NF4 or bf16."""
    from peft import get_peft_model, prepare_model_for_kbit_training
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    method, folder = job.workload.method, place / "model"
    if method == "full":
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if method == "lora":
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    else:
        stored = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.bfloat16,
        )  # fmt: skip
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.bfloat16, quantization_config=stored
        )
        model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    return get_peft_model(model, adapter(job))


def trl(job: Job, place: Path, turn: InTurn) -> None:
    """TRL's SFTTrainer with defaults: padding and activation checkpointing."""
    _sft(job, place, turn, dataset(read_rows(place)).remove_columns("attention_mask"), {})


def trl_packing(job: Job, place: Path, turn: InTurn) -> None:
    """TRL's SFTTrainer with best-fit-decreasing packing, without activation checkpointing.

    The rows of each step are packed separately, so that steps have the same rows as elsewhere.
    """
    from trl.data_utils import pack_dataset

    rows = read_rows(place)
    steps = [of_step(rows, step, job.rows) for step in range(job.steps)]
    longest = max(sum(len(ids) for ids, _ in step) for step in steps)
    plain = [dataset(step).remove_columns("attention_mask") for step in steps]
    packs = concatenate_datasets([pack_dataset(each, longest, "bfd") for each in plain])
    packing = {
        "packing": True, "max_length": longest, "gradient_checkpointing": False,
        "per_device_train_batch_size": 1, "gradient_accumulation_steps": 1,
        "dataset_kwargs": {"skip_prepare_dataset": True},
    }  # fmt: skip
    _sft(job, place, turn, packs, packing)


def _sft(job: Job, place: Path, turn: InTurn, rows: Dataset, more: dict[str, Any]) -> None:
    from trl import SFTConfig, SFTTrainer

    arguments = {"train_sampling_strategy": "sequential", **common(job, place), **more}
    SFTTrainer(
        str(place / "model"),
        SFTConfig(**arguments, model_init_kwargs={"dtype": "bfloat16"}),
        train_dataset=rows,
        peft_config=adapter(job),
        callbacks=[turn],
    ).train()


def llamafactory(job: Job, place: Path, turn: InTurn) -> None:
    """LLaMA-Factory's SFT stage without activation checkpointing."""
    from llamafactory.train.tuner import run_exp

    tokenised = place / "tokenised"
    shutil.rmtree(tokenised, ignore_errors=True)  # from another job
    dataset(read_rows(place)).save_to_disk(tokenised)
    arguments = {
        "stage": "sft", "do_train": True, "model_name_or_path": str(place / "model"),
        "finetuning_type": "lora", "lora_rank": job.r, "lora_alpha": job.alpha,
        "lora_dropout": 0.0, "lora_target": "all", "dataset": "named, not read",
        "tokenized_path": str(tokenised),
        "template": "empty", "cutoff_len": 8192, "disable_shuffling": True,
        "disable_gradient_checkpointing": True, "plot_loss": False,
    }  # fmt: skip
    run_exp(arguments | common(job, place), callbacks=[turn])


def unsloth(job: Job, place: Path, turn: InTurn) -> None:
    """Unsloth's model with TRL's SFTTrainer, padding-free; it needs a GPU."""
    from unsloth import FastLanguageModel  # isort: skip  (it patches the other libraries)
    from trl import SFTConfig, SFTTrainer

    model, tokenizer = FastLanguageModel.from_pretrained(
        str(place / "model"), max_seq_length=2048, dtype=torch.bfloat16, load_in_4bit=False
    )
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    model = FastLanguageModel.get_peft_model(
        model, r=job.r, lora_alpha=job.alpha, lora_dropout=0, target_modules=targets
    )
    SFTTrainer(
        model,
        SFTConfig(**common(job, place), train_sampling_strategy="sequential"),
        train_dataset=dataset(read_rows(place)).remove_columns("attention_mask"),
        processing_class=tokenizer,
        callbacks=[turn],
    ).train()


CONTENDERS: dict[str, Callable[[Job, Path, InTurn], None]] = {
    "trainer": trainer_peft,
    "trainer_grouped": trainer_grouped,
    "trl": trl,
    "trl_packing": trl_packing,
    "llamafactory": llamafactory,
    "unsloth": unsloth,
}


def main(name: str, place: Path) -> None:
    turns = Turns()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    CONTENDERS[name](read_job(place), place, InTurn(turns))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
