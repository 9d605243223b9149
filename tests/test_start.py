"""A process of a job starts without what it may never use."""

import subprocess
import sys

import torch
from conftest import ROOT

from finetune.start import compiling_later


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


def test_training_is_imported_without_a_compiler() -> None:
    """bitsandbytes would load it; should that change, the context above may go."""
    script = (
        "import sys; from finetune.start import compiling_later\n"
        "{}: import finetune.worker\n"
        "print('torch._inductor.compile_fx' in sys.modules)"
    )
    for context, loaded in (("if True", True), ("with compiling_later()", False)):
        done = subprocess.run(
            [sys.executable, "-c", script.format(context)],
            cwd=ROOT, capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert done.stdout.splitlines()[-1] == str(loaded)
