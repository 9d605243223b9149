"""Compare a plan's memory formulas with a step of the real model on fake tensors."""
