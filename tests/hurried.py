"""Spend less on what each process of a test does before its first step; imported for its effects.

The rate of products, which no test needs exactly, is that of small ones, which take milliseconds
even in emulated bfloat16; and what the forks of a warm interpreter would each read or make again is
made before them.
"""

import os

# There is no network: a name that is not on disk would be requested five times, with waits between
# them. The library reads this variable when it is imported.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from transformers.conversion_mapping import get_checkpoint_conversion_mapping

from finetune.kernels import matmul_rate
from finetune.runs.environment import versions

matmul_rate.SECONDS = 0.01
matmul_rate.SIDES["cpu"] = 128
versions()
get_checkpoint_conversion_mapping("llama")  # a table of every family
