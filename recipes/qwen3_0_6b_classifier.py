"""Qwen3-0.6B, a classifier with LoRA, on AG News: topics of 120,000 texts, one consumer GPU."""

from finetune import Classifier, Data, Model

recipe = (
    Classifier(
        Model("Qwen/Qwen3-0.6B"), labels=("World", "Sports", "Business", "Sci/Tech"), epochs=1
    )
    .with_data(
        Data("fancyzhx/ag_news", "labelled"),
        eval_data=Data("fancyzhx/ag_news", "labelled", split="test", first=2000),
    )
    .with_lora(r=16)
    .with_batch(rows=64, micro_rows=8, max_length=256, overlong="truncate")
    .with_optim(lr=2e-4)
    .with_evaluation(every=500)
    .with_saving(every=500)
    .with_backend("single")
)
