"""Check a model or a recipe before a GPU is rented: `finetune doctor`."""
