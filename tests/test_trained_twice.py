"""A script that trains twice in the processes of one launch."""

import pytest
from conftest import accelerate_launch, losses

import finetune as ft
from finetune import backend as backends

TWICE = """
import sys
from pathlib import Path
import finetune as ft

recipe = ft.load_recipe(sys.argv[1])
for name in ("first", "second"):
    options = ft.Options(Path(sys.argv[2]) / name, plot=False)
    print(name, ft.train(recipe, precision="fp32", options=options).root)
"""


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["fsdp_full_shard", "zero3", "pp"])
def test_processes_of_a_launch_train_twice(backend, run_of, tmp_path):
    alone = run_of(max_steps=2, saving={"every": 2}, evaluation={"every": 2})
    script = tmp_path / "twice.py"
    script.write_text(TWICE)
    sizes = backends.load(backend).axes.variables()
    words = (script, alone.recipe, tmp_path)
    done = accelerate_launch(backend, tmp_path, *words, env=sizes)
    assert done.status == 0, done.output
    first, second = (losses(ft.open_run(tmp_path / name)) for name in ("first", "second"))
    assert first == second == pytest.approx(losses(alone), rel=5e-6)
