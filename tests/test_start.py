"""A process of a job starts without what it may never use."""

import gc
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from conftest import ROOT
from torch.utils import cpp_extension

from finetune.cache import COMPILED, keep_compiled
from finetune.distributed.deepspeed import without_values
from finetune.distributed.deepspeed_nvme import require_async_io
from finetune.kernels.pointwise import usual_folder
from finetune.process.imports import collecting_later, compiling_later
from finetune.runs import limits


def test_what_is_compiled_while_importing_is_compiled_when_it_is_called():
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


@pytest.mark.slow  # every library is imported
def test_libraries_are_imported_without_a_compiler():
    """bitsandbytes and DeepSpeed's Muon would load it; should that change, the context may go."""
    script = (
        "import sys; from finetune.process.imports import compiling_later\n"
        "with compiling_later():\n"
        "    import finetune.training.worker, deepspeed.runtime.zero.muon.muon_optimizer\n"
        "print('bitsandbytes' in sys.modules, 'torch._inductor.compile_fx' in sys.modules)"
    )
    assert last_line(script) == "True False"


def last_line(script: str, **env: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT, env=os.environ | env, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return done.stdout.splitlines()[-1]


@pytest.mark.skipif(sys.platform != "linux", reason="binds a process to cores")
def test_a_process_counts_the_cores_that_it_may_use():
    first = min(os.sched_getaffinity(0))
    script = (
        f"import os; os.sched_setaffinity(0, [{first}])\n"
        "from finetune.runs.limits import usable_cores; print(usable_cores())"
    )
    assert last_line(script) == "1"


def test_a_small_model_takes_one_thread_and_another_those_of_the_process():
    script = (
        "import torch; from finetune.models.threads import settle_threads\n"
        "for width in (2_000, 100, 2_000):\n"
        "    settle_threads(torch.nn.Linear(width, width, device='meta'))\n"
        "    print(torch.get_num_threads(), end=' ')"
    )
    assert last_line(script, OMP_NUM_THREADS="2") == "2 1 2 "


GIB = 2**30
FIRST = {  # a group of version 1, whose path is that of the host
    "proc": "4:memory:/docker/a\n3:cpu,cpuacct:/docker/a\n0::/",
    "memory/memory.limit_in_bytes": 2 * GIB,
    "memory/memory.usage_in_bytes": GIB,
    "memory/memory.stat": f"cache 7\ntotal_inactive_file {GIB // 2}\ninactive_file 0",
    "cpu/cpu.cfs_quota_us": 50_000,
    "cpu/cpu.cfs_period_us": 100_000,
}
SECOND = {  # of version 2, which a wider one limits to fewer cores
    "proc": "0::/job/step",
    "job/step/memory.max": 2 * GIB,
    "job/step/memory.current": GIB,
    "job/step/memory.stat": f"inactive_file {GIB // 2}",
    "job/step/cpu.max": "max 100000",
    "job/memory.max": "max",
    "job/cpu.max": "150000 100000",
}
FREE = {"proc": "0::/", "memory.max": "max", "memory.current": GIB, "cpu.max": "max 100000"}


@pytest.mark.parametrize("files", [FIRST, SECOND, FREE, {}])
def test_the_limits_of_a_container_are_what_a_process_may_use(files, tmp_path, monkeypatch):
    for name, value in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{value}\n")
    monkeypatch.setattr(limits, "GROUPS", tmp_path)
    monkeypatch.setattr(limits, "OWN", tmp_path / "proc")
    if files in (FIRST, SECOND):
        assert limits.memory() == (2 * GIB, GIB + GIB // 2)
        assert limits.usable_cores() == 1
        assert limits.limits_threads()
    else:
        assert limits.memory().total == psutil.virtual_memory().total
        assert limits.usable_cores() == len(os.sched_getaffinity(0))
        assert not limits.limits_threads()


def test_models_are_listed_once():
    script = (
        "import sys; from finetune.process.imports import read_models_once; read_models_once()\n"
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


def test_garbage_is_looked_for_after_an_import_as_before_it():
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


def test_a_parameter_is_described_without_its_values_while_an_engine_is_built():
    parameter = torch.nn.Parameter(torch.full((2,), 0.625))
    with without_values():
        assert "0.625" not in f"{parameter} {[parameter]}"
    assert "0.625" in f"{parameter}"


def test_an_operator_that_lean_headers_cannot_build_is_built_with_all(tmp_path, monkeypatch):
    """The builder is DeepSpeed's; what it would compile is not."""
    op_builder = pytest.importorskip("deepspeed.ops.op_builder")
    if not Path("/usr/include/libaio.h").exists():
        pytest.skip("libaio-dev is not installed")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    built: list[dict[str, Any]] = []

    def load(**options: Any) -> None:
        built.append(options)
        if "-g0" in options["extra_cflags"]:
            raise RuntimeError("no such header")

    monkeypatch.setattr(cpp_extension, "load", load)
    asked = {
        "name": "async_io", "sources": ["/a.cpp", "/b.cpp"], "extra_cflags": ["-O0"],
        "extra_include_paths": ["/aio"],
    }  # fmt: skip
    monkeypatch.setattr(
        op_builder.AsyncIOBuilder, "load", lambda *_, **__: cpp_extension.load(**asked)
    )
    locks = [tmp_path / name / "lock" for name in ("async_io", "pin_memory")]
    for _ in range(2):
        for lock in locks:  # as a killed build leaves it; torch would wait for it forever
            lock.parent.mkdir(exist_ok=True)
            lock.touch()
            lock.with_name("async_io.so").touch()
        require_async_io(lambda _: None)
        assert not any(lock.exists() for lock in locks)
    lean, whole, again = built
    folder = tmp_path / "finetune-headers"
    one = folder / "async_io.cpp"
    added = {"extra_cflags": ["-O0", "-g0"], "extra_include_paths": [str(folder), "/aio"]}
    assert lean == asked | added | {"sources": [str(one)]}
    assert re.findall(r'#include "(.*)"', one.read_text()) == asked["sources"]
    assert (folder / "torch" / "extension.h").is_file()
    assert whole == again == asked


def test_compiled_code_is_cached_unless_the_user_sets_a_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path))
    ours = str(tmp_path / "compiled")
    # The second is set by PyTorch itself, as it was imported.
    for named, kept in ((None, ours), (usual_folder(), ours), ("/a", "/a")):
        monkeypatch.delenv(COMPILED, raising=False)
        if named is not None:
            monkeypatch.setenv(COMPILED, named)
        keep_compiled(usual_folder)
        assert os.environ[COMPILED] == kept
