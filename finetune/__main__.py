"""`python -m finetune`, which is what `accelerate launch` runs."""

from finetune.cli.main import run

run()
