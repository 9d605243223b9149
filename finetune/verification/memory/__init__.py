"""Holds a plan against the real model: a step with fake tensors, beside what the formulas say."""
