"""User code that a type checker in strict mode accepts; it is checked, never run."""

from pathlib import Path
from typing import assert_type

import finetune as ft

recipe = (
    ft.SFT(ft.Model("Qwen/Qwen3-0.6B", quantization="nf4"), eval_rows=512, train_on="completion")
    .with_data(ft.Data("rows.jsonl", "messages"), eval_data=ft.Data("more.jsonl", "messages"))
    .with_lora(r=8, targets=("q_proj", "v_proj"), rank_pattern={"q_proj": 4})
    .with_batch(rows=16, micro_rows=4, overlong="split", micro_tokens=None)
    .with_optim(lr=2e-4, betas=(0.9, 0.95), max_grad_norm=None)
    .with_optim(ft.Optim(lr=2e-4))
    .with_kernels(pointwise="eager")
    .with_evaluation(every=10, patience=3)
    .with_saving(every=10, keep=1)
    .with_model(ft.Model("other"))
    .with_epochs(1.5)
    .with_steps(10)
    .with_seed(3)
    .with_backend("zero2")
)
assert_type(recipe, ft.SFT)
assert_type(ft.DPO(ft.Model("m"), beta=0.2, loss_type="ipo").with_lora(4), ft.DPO)
assert_type(ft.ORPO(ft.Model("m"), beta=0.2), ft.ORPO)
assert_type(ft.KTO(ft.Model("m"), beta=0.2), ft.KTO)
assert_type(ft.GRPO(ft.Model("m"), reward_funcs=(ft.Reward("exact_match"),)), ft.GRPO)
assert_type(ft.RLOO(ft.Model("m")), ft.RLOO)
assert_type(ft.SimPO(ft.Model("m"), gamma=0.5), ft.SimPO)
assert_type(ft.CPO(ft.Model("m"), sft_weight=0.0), ft.CPO)
assert_type(ft.Pretrain().with_qlora(4), ft.Pretrain)
assert_type(ft.RewardModel(ft.Model("m")).with_lora(4), ft.RewardModel)
assert_type(ft.Classifier(ft.Model("m"), labels=("no", "yes")), ft.Classifier)
assert_type(ft.Distill(ft.Model("m"), teacher=ft.Teacher("n"), temperature=2.0), ft.Distill)
assert_type(ft.load_recipe("quickstart", ["optim.lr=1e-4"]), ft.Recipe)
assert_type(ft.recipe_for("m", "data.jsonl", gpu="RTX4090", gpus=2), ft.Recipe)

plan = ft.plan(recipe, "fsdp_full_shard", processes=2)
assert_type(plan, ft.Plan)
assert_type(plan.explain(), str)
prediction = ft.plan(recipe, gpu="H100-80", gpus=8, nodes=1, price=2.5)
assert_type(prediction, ft.Prediction)
assert_type(prediction.page(), str)
numbers = ft.plan(recipe, gpu_memory=80, tflops=900, bandwidth=3000)
assert_type(numbers, ft.Prediction)

run = ft.launch(recipe, backend="zero2", processes=2, output=Path("runs/mine"), resume="auto")
assert_type(run, ft.Run)
assert_type(ft.train(recipe, precision="fp32", options=ft.Options(Path("runs/mine"))), ft.Run)
assert_type(ft.open_run("runs/mine").newest(), int | None)
assert_type(run.final, Path)
assert_type(ft.export(run, "folder", merge=True), Path)
assert_type(ft.report(run), Path)
assert_type(ft.plot_loss(run), Path | None)

loaded = ft.load(run, step="best")
assert_type(loaded, ft.Loaded)
assert_type(ft.load_base(recipe, loaded.tokenizer), ft.Loaded)
assert_type(ft.open_model("folder"), ft.Loaded)
assert_type(ft.generate(loaded, ["hello", [{"role": "user", "content": "hi"}]]), list[str])
assert_type(ft.exact_match(loaded, ft.references(ft.Data("d", "messages"))).share, float)
assert_type([finding.name for finding in ft.doctor(recipe)], list[str])
ft.prove(recipe, "ddp,zero2", processes=2, steps=3)
ft.quickstart_data(Path("quickstart"))

try:
    ft.open_run("nowhere")
except ft.FinetuneError as error:
    assert_type(error.problems, tuple[str, ...])
    print(isinstance(error, ft.TrainingFailure | ft.Interrupted), ft.__version__)
