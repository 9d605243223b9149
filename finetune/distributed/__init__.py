"""Distributed training: one file per engine, each driven through Accelerate."""
