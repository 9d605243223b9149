"""Training: the worker process, the stages of a run, the loop, and the parts of a step."""
