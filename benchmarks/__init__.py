"""Benchmarks and their results; `python -m benchmarks` measures them again."""
