"""TRL's trainers of methods, configured as in its documentation, in TRL's environment.

`python -m benchmarks.peers.method_trl NAME PLACE`: `trl` with defaults, which include activation
checkpointing; `trl_kept` without activation checkpointing.
"""

import os
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset

from benchmarks.peers import method_job
from benchmarks.peers.method_job import MethodJob, read_job, read_lines
from benchmarks.peers.trainers import InTurn, adapter
from benchmarks.peers.turns import Turns


class MethodInTurn(InTurn):
    """Lets a trainer take one optimizer step per line of input, and reports what it logs."""

    def __init__(self, turns: Turns, watching: bool) -> None:
        super().__init__(turns)
        self.watching = watching

    def on_train_begin(self, *_: Any, model: torch.nn.Module, **__: Any) -> None:
        if self.watching:
            self.turns.watch(model, read)
        self.turns.ready()
        self.turns.wait()

    def on_log(self, *_: Any, logs: dict[str, float], **__: Any) -> None:
        if "loss" in logs:
            self.turns.answer(float(logs["loss"]), {k: float(v) for k, v in logs.items()})
            self.turns.wait()


def read(
    input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None, **_: Any
) -> dict[str, Any]:
    """The inputs of a forward pass, under the names of `turns.documents`."""
    return {"ids": input_ids, "labels": input_ids, "mask": attention_mask}


def arguments(job: MethodJob, place: Path, kept: bool) -> dict[str, Any]:
    """Arguments of a trainer: those of the job in fp32, with saving and reporting disabled."""
    made: dict[str, Any] = {
        "output_dir": str(place / "trl"), "max_steps": job.steps, "learning_rate": job.lr,
        "lr_scheduler_type": "constant", "per_device_train_batch_size": job.rows,
        "bf16": False, "use_cpu": True, "logging_steps": 1, "save_strategy": "no",
        "report_to": "none", "disable_tqdm": True, "seed": job.seed,
    }  # fmt: skip
    if job.method == "grpo":
        made |= {
            "num_generations": method_job.GENERATIONS, "shuffle_dataset": False,
            "max_completion_length": method_job.COMPLETION_TOKENS,
        }  # fmt: skip
    else:
        made |= {"train_sampling_strategy": "sequential"}
    if job.method in ("dpo", "kto", "grpo"):
        made |= {"model_init_kwargs": {"dtype": "float32"}}
    return made | ({"gradient_checkpointing": False} if kept else {})


def with_pictures(place: Path, rows: Dataset) -> Dataset:
    """Rows whose files of pictures are decoded when they are read."""
    from datasets import Image, List

    files = [[str(place / each) for each in of_row] for of_row in rows["images"]]
    return (
        rows.remove_columns("images")
        .add_column("images", files)
        .cast_column("images", List(Image()))
    )


def image_processor(folder: Path) -> Any:
    """The model's processor without its part for videos, which needs torchvision."""
    from transformers import AutoImageProcessor, AutoTokenizer, Qwen2_5_VLProcessor

    class OfImages(Qwen2_5_VLProcessor):
        def check_argument_for_proper_class(self, *_: Any) -> None: ...

    tokenizer = AutoTokenizer.from_pretrained(folder)
    images = AutoImageProcessor.from_pretrained(folder)
    return OfImages(images, tokenizer, chat_template=tokenizer.chat_template)


def train(job: MethodJob, place: Path, turn: InTurn, kept: bool) -> None:
    """Run the trainer of a method to its last step."""
    given = arguments(job, place, kept)
    rows, model = Dataset.from_list(read_lines(place)), str(place / "model")
    common: dict[str, Any] = {"train_dataset": rows, "callbacks": [turn]}
    lora = adapter(job)  # type: ignore[arg-type]
    if job.method == "dpo":
        from trl import DPOConfig, DPOTrainer

        DPOTrainer(model, args=DPOConfig(**given), peft_config=lora, **common).train()
    elif job.method == "kto":
        from trl import KTOConfig, KTOTrainer

        KTOTrainer(model, args=KTOConfig(**given), peft_config=lora, **common).train()
    elif job.method == "reward":
        from trl import RewardConfig, RewardTrainer

        lora.task_type, lora.modules_to_save = "SEQ_CLS", ["score"]
        given |= {"model_init_kwargs": {"dtype": "float32"}}
        RewardTrainer(model, args=RewardConfig(**given), peft_config=lora, **common).train()
    elif job.method == "images":
        from trl import SFTConfig, SFTTrainer

        lora.target_modules = r".*language_model\..*_proj"  # those of the toolkit's default
        given |= {"model_init_kwargs": {"dtype": "float32"}, "max_length": None}
        SFTTrainer(
            model, args=SFTConfig(**given), peft_config=lora,
            processing_class=image_processor(place / "model"),
            **common | {"train_dataset": with_pictures(place, rows)},
        ).train()  # fmt: skip
    elif job.method == "orpo":
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from trl.experimental.orpo import ORPOConfig, ORPOTrainer

        network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        ORPOTrainer(
            network, args=ORPOConfig(**given), peft_config=lora,
            processing_class=AutoTokenizer.from_pretrained(model), **common,
        ).train()  # fmt: skip
    else:
        from trl import GRPOConfig, GRPOTrainer

        GRPOTrainer(
            model, args=GRPOConfig(**given), peft_config=lora,
            reward_funcs=method_job.even_share, **common,
        ).train()  # fmt: skip


def main(name: str, place: Path) -> None:
    turns, job = Turns(), read_job(place)
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    turn = MethodInTurn(turns, watching=job.method != "grpo")
    train(job, place, turn, kept=name == "trl_kept")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
