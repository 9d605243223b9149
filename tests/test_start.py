"""A process of a job starts without what it may never use."""

import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT

from finetune.cache import COMPILED, keep_compiled
from finetune.kernels.chains import usual_folder
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


def test_libraries_are_imported_without_a_compiler() -> None:
    """bitsandbytes and DeepSpeed's Muon would load it; should that change, the context may go."""
    script = (
        "import sys; from finetune.start import compiling_later\n"
        "with compiling_later():\n"
        "    import finetune.worker, deepspeed.runtime.zero.muon.muon_optimizer\n"
        "print('bitsandbytes' in sys.modules, 'torch._inductor.compile_fx' in sys.modules)"
    )
    assert last_line(script) == "True False"


def last_line(script: str, **env: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT, env=os.environ | env, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return done.stdout.splitlines()[-1]


def test_models_are_listed_once() -> None:
    script = (
        "import sys; from finetune.start import read_models_once; read_models_once()\n"
        "opened = 0\n"
        "def hook(event, given):\n"
        "    global opened\n"
        "    opened += event == 'open' and '/transformers/models/' in str(given[0])\n"
        "sys.addaudithook(hook)\n"
        "import transformers.models\n"
        "listed = transformers.models._import_structure\n"
        "print(opened < 100, len(listed) > 100, 'llama.modeling_llama' in listed)"
    )
    assert last_line(script) == "True True True"


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


def test_compiled_code_is_kept_unless_a_person_says_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path))
    for named, kept in (
        (None, str(tmp_path / "compiled")),
        (usual_folder(), str(tmp_path / "compiled")),  # by PyTorch itself, as it was imported
        ("/a", "/a"),
    ):
        monkeypatch.delenv(COMPILED, raising=False)
        if named is not None:
            monkeypatch.setenv(COMPILED, named)
        keep_compiled(usual_folder)
        assert os.environ[COMPILED] == kept
