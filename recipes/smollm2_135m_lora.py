"""SmolLM2-135M-Instruct, LoRA, on grade-school maths: any GPU, or a patient CPU."""

from finetune import SFT, Data, Model

QUESTIONS = Data("openai/gsm8k", "question_answer", subset="main")
HELD_OUT = Data("openai/gsm8k", "question_answer", subset="main", split="test", first=256)

recipe = (
    SFT(Model("HuggingFaceTB/SmolLM2-135M-Instruct"), epochs=3)
    .with_data(QUESTIONS, eval_data=HELD_OUT)
    .with_lora(r=16)
    .with_batch(rows=32, micro_rows=4, max_length=1024, overlong="drop")
    .with_optim(lr=2e-4)
    .with_evaluation(every=100)
    .with_saving(every=100)
    .with_backend("single")
)
