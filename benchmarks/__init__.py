"""What was measured, with the command that measures it again: `python -m benchmarks`."""
