"""Train: the worker's stages, the loop, and what each step needs."""
