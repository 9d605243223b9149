"""What every rank must have alike before the first step."""

import dataclasses
import re

from conftest import problems_of

from finetune.checks.start import Identity, agree, libraries
from finetune.runs.environment import versions


def test_every_library_that_takes_part_is_compared_and_finetune_by_its_source():
    named = dict(part.split(" ") for part in libraries("deepspeed").split(", "))
    assert next(iter(named)) == "torch"
    for name in ("bitsandbytes", "tokenizers", "datasets", "transformers", "deepspeed"):
        assert named.get(name) == versions().get(name)
    assert re.fullmatch("[0-9a-f]{12}", named["finetune"])
    assert "deepspeed" not in libraries("fsdp")
    assert "tensorboard" not in named


def test_a_rank_with_other_libraries_is_named_and_ranks_that_differ_alike_in_one_line():
    mine = Identity(recipe="r", base="b", data="d", libraries="torch 1, tokenizers 2", settings="s")
    other = dataclasses.replace(mine, libraries="torch 1, tokenizers 3")
    assert problems_of(agree, [mine, mine, other]) == (
        "rank 2 differs from rank 0 in libraries: torch 1, tokenizers 3 instead of torch 1, "
        "tokenizers 2; install the same versions on every host",
    )
    other = dataclasses.replace(mine, base="c")
    assert problems_of(agree, [mine] * 8 + [other] * 16) == (
        "ranks 8, 9, 10, 11, 12, 13, 14, 15 and 8 more differ from rank 0 in base: c instead of b; "
        "give every host the same files of the base model",
    )
