"""A process of a job starts without what it may never use."""

import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT

from finetune.start import collecting_later, compiling_later


def test_what_is_compiled_while_importing_is_compiled_when_it_is_called() -> None:
    compile_now = torch.compile
    with compiling_later():

        @torch.compile(backend="eager", fullgraph=True)
        def doubled(x: torch.Tensor) -> torch.Tensor:
            """Twice."""
            return 2 * x

        halved = torch.compile(lambda x: x / 2, backend="eager")
    assert torch.compile is compile_now
    assert (doubled.__name__, doubled.__doc__) == ("doubled", "Twice.")
    assert torch.equal(doubled(torch.ones(2)), torch.full((2,), 2.0))
    assert torch.equal(halved(torch.ones(2)), torch.full((2,), 0.5))


@pytest.mark.parametrize(
    "loaded",
    [
        "finetune.worker",  # bitsandbytes is loaded
        "deepspeed, deepspeed.runtime.zero.muon.muon_optimizer",
    ],
)
def test_libraries_are_imported_without_a_compiler(loaded: str) -> None:
    """Both would load it; should that change, the context above may go."""
    script = (
        "import sys; from finetune.start import compiling_later\n"
        f"{{}}: import {loaded}\n"
        "print('torch._inductor.compile_fx' in sys.modules)"
    )
    for context, compiler in (("if True", "True"), ("with compiling_later()", "False")):
        assert last_line(script.format(context)) == compiler


def last_line(script: str, **env: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT, env=os.environ | env, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return done.stdout.splitlines()[-1]


def test_models_are_listed_once_and_all_of_them() -> None:
    script = (
        "import sys, torch; from finetune.start import read_models_once\n"
        "{}from transformers.utils import import_utils\n"
        "opened = 0\n"
        "def hook(event, args):\n"
        "    global opened\n"
        "    opened += event == 'open' and '/transformers/models/' in str(args[0]) "
        "and str(args[0]).endswith('.py')\n"
        "sys.addaudithook(hook)\n"
        "import transformers.models\n"
        "names = sorted(transformers.models._import_structure)\n"
        "print(opened > 1000, hash(tuple(names)), len(names) > 100)"
    )
    seed = {"PYTHONHASHSEED": "0"}
    again, listed, many = last_line(script.format(""), **seed).split()
    once, same, _ = last_line(script.format("read_models_once(); "), **seed).split()
    assert (again, once) == ("True", "False")
    assert (same, many) == (listed, "True")


def test_garbage_is_looked_for_after_an_import_as_before_it() -> None:
    with collecting_later():
        assert not gc.isenabled()
    assert gc.isenabled()
    gc.disable()
    try:
        with collecting_later():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
        gc.unfreeze()


def test_compiled_code_is_kept_unless_a_person_says_where(tmp_path: Path) -> None:
    script = (
        "import os; from finetune.cache import keep_compiled\n"
        "from finetune.kernels.chains import usual_folder\n"
        "{}keep_compiled(usual_folder); print(os.environ['TORCHINDUCTOR_CACHE_DIR'])"
    )
    here = {"FINETUNE_CACHE": str(tmp_path), "TORCHINDUCTOR_CACHE_DIR": ""}
    unset = "del os.environ['TORCHINDUCTOR_CACHE_DIR']; "
    kept = str(tmp_path / "compiled")
    assert last_line(script.format(unset), **here) == kept
    assert last_line(script.format(unset + "import torch._inductor; "), **here) == kept
    assert last_line(script.format(""), **here | {"TORCHINDUCTOR_CACHE_DIR": "/a"}) == "/a"
