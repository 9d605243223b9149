"""Fused operations: one module for each kernel option, chosen by the plan."""
