"""Check a model or a recipe before renting a GPU: `finetune doctor`."""
