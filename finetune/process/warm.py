"""Provide an interpreter whose processes are forks of a process with everything imported.

A training process spends more time importing PyTorch and related libraries than a tiny model needs
for a few steps. A process started by this interpreter is still separate, with its own session,
environment variables, working folder and files, and it ends as usual; only its imports are already
done. Processes that it starts through `sys.executable`, such as launchers and their workers, are
forks too. Proofs, with their many launches, and the tests use it on machines without a GPU, because
GPU libraries cannot be forked.
"""

import atexit
import contextlib
import importlib
import itertools
import json
import os
import runpy
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from finetune.process import interpreter

if TYPE_CHECKING:
    import psutil

TRAINING = (
    "finetune.cli.main", "finetune.training.worker", "finetune.exporters.export",
    "finetune.launchers.accelerate", "accelerate.commands.launch", "torch.distributed.run",
    "transformers.models.llama.modeling_llama", "deepspeed",
)  # fmt: skip
"""Modules imported by commands that train and by their launchers."""
READY = "ready"
PREFIX = "finetune-warm-"
REQUEST = 1 << 20
"""Maximum bytes of a request: arguments, folder and environment variables."""

INTERPRETER = """#!{python} -SE
import json, os, select, signal, socket, sys
words = sys.argv[1:]
if words[:1] not in (["-m"], ["-u"]) and words[:2] != ["-P", "-m"]:
    os.execv({python!r}, [{python!r}, *words])
asked = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
asked.connect({address!r})
request = dict(python=sys.argv[0], words=words, folder=os.getcwd(), variables=dict(os.environ))
socket.send_fds(asked, [json.dumps(request).encode()], [0, 1, 2])
hear, wake = socket.socketpair()
wake.setblocking(False)
signal.set_wakeup_fd(wake.fileno())
process = int(asked.recv(64))
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, lambda number, _: os.kill(process, number))
while asked not in select.select([asked, hear], [], [])[0]:
    hear.recv(64)
status = int(asked.recv(64) or -signal.SIGKILL)
if status < 0:
    if -status != signal.SIGKILL:
        signal.signal(-status, signal.SIG_DFL)
    os.kill(os.getpid(), -status)
os._exit(status)
"""
"""Takes the arguments of `python`, forwards signals, and exits like the process that it requested.

A signal just before it begins to wait would only be handled after the wait, were it not for `wake`.

A plain script, unlike one that torch's agent starts with `-u`, may rely on nothing being imported,
and code (`-c`) on its parent process: both get a new interpreter.
"""


class Warm:
    """The interpreter `python`, until `close` or the end of this process.

    Args:
        modules: modules to import; failures are ignored until a process needs the module.
        environment: environment variables for the imports; by default those of this process.
    """

    def __init__(
        self, modules: Sequence[str], environment: Mapping[str, str] | None = None
    ) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix=PREFIX))
        self.python = str(self._folder / "python")
        self._server = subprocess.Popen(
            [sys.executable, "-P", "-m", "finetune.process.warm", str(self._folder), *modules],
            env=interpreter.environment(os.environ if environment is None else environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,  # it must not receive signals of the terminal
        )
        atexit.register(self.close)
        assert self._server.stdout is not None
        if not any(line == f"{READY}\n" for line in self._server.stdout):
            raise OSError(f"{self.python}: ended with status {self._server.wait()}")

    def family(self) -> list["psutil.Process"]:
        """All running processes that belong to this interpreter, with their descendants.

        A fork keeps the command line of the server, and a process that asked for one has that of
        `python`: both name the folder.
        """
        import psutil

        found: dict[psutil.Process, None] = {}
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if not {str(self._folder), self.python}.isdisjoint(process.cmdline()):
                    found |= dict.fromkeys((*process.children(recursive=True), process))
        return list(found)

    def close(self) -> None:
        """Stop starting processes; those already started continue."""
        self._server.kill()
        self._server.wait()
        shutil.rmtree(self._folder, ignore_errors=True)


def available() -> bool:
    """Whether this machine supports warm interpreters: Linux, without a GPU."""
    import torch

    return sys.platform == "linux" and not torch.accelerator.is_available()


def asked_by(command: Sequence[str], process: int) -> int | None:
    """Id of the process forked for a warm interpreter with this command and process id."""
    for word in command[:3]:
        folder = Path(word).parent
        if folder.name.startswith(PREFIX):
            with contextlib.suppress(OSError, ValueError):
                return int((folder / str(process)).read_text())
    return None


# The server --------------------------------------------------------------------------------------


def main(folder: Path, modules: Sequence[str]) -> None:
    """Import the modules, then fork a process for each request, until the parent process ends."""
    from finetune.process.imports import collecting_later, compiling_later, read_models_once

    with collecting_later(), compiling_later():
        read_models_once()
        for module in modules:
            with contextlib.suppress(ImportError):
                importlib.import_module(module)
    address, python = folder / "socket", folder / "python"
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listening.bind(str(address))
    listening.listen(64)
    listening.settimeout(5)
    python.write_text(INTERPRETER.format(python=sys.executable, address=str(address)))
    python.chmod(0o755)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # keepers are not waited for
    print(READY, flush=True)
    started_by = os.getppid()
    while os.getppid() == started_by:
        try:
            connection, _ = listening.accept()
        except TimeoutError:
            continue
        if not os.fork():
            listening.close()
            _keep(connection, folder)
        connection.close()


def _keep(connection: socket.socket, folder: Path) -> NoReturn:
    """Run as the parent of a requested process; kill it if the requesting process is killed."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    message, files, _, _ = socket.recv_fds(connection, REQUEST, 3)
    process = os.fork()
    if not process:
        connection.close()
        _become(json.loads(message), files)
    for file in files:
        os.close(file)
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    known = folder / str(int.from_bytes(credentials[:4], sys.byteorder))
    known.write_text(str(process))
    with contextlib.suppress(OSError):  # who asked is gone: the wait below kills the process
        connection.send(str(process).encode())
    ended = os.pidfd_open(process)
    ready = selectors.DefaultSelector()
    ready.register(ended, selectors.EVENT_READ)
    ready.register(connection, selectors.EVENT_READ)
    if not any(key.fileobj == ended for key, _ in ready.select()):
        os.kill(process, signal.SIGKILL)
        os._exit(1)
    status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    with contextlib.suppress(OSError):
        known.unlink()
    with contextlib.suppress(OSError):
        connection.send(str(status).encode())
    os._exit(0)


def _become(request: dict[str, Any], files: list[int]) -> NoReturn:
    """Become the process of `python WORDS` with the request's folder, variables and files."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for descriptor, file in enumerate(files):
        os.dup2(file, descriptor)
        os.close(file)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["variables"])
    sys.executable = request["python"]
    words = list(itertools.dropwhile(("-u", "-P").__contains__, request["words"]))
    safe = "-P" in request["words"] or "PYTHONSAFEPATH" in os.environ
    status = 1
    try:
        _use_threads()
        _run(words, safe)
        status = 0
    except SystemExit as asked:
        status = asked.code if isinstance(asked.code, int) else int(asked.code is not None)
        if isinstance(asked.code, str):
            print(asked.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    threading._shutdown()  # the steps of an interpreter's exit, without its finalization
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _use_threads() -> None:
    """Set PyTorch's threads to OMP_NUM_THREADS, which OpenMP reads only when it is loaded."""
    torch: Any = sys.modules.get("torch")
    asked = os.environ.get("OMP_NUM_THREADS", "")
    if torch is not None and asked.isdigit() and int(asked) != torch.get_num_threads():
        torch.set_num_threads(int(asked))


def _run(words: list[str], safe: bool) -> None:
    """Run `-m MODULE` or a file as the main module."""
    added = [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each]
    sys.path[:0] = [each for each in added if each not in sys.path]
    is_module = words[0] == "-m"
    sys.argv = words[1:] if is_module else words
    if not safe:
        sys.path.insert(0, os.getcwd() if is_module else str(Path(words[0]).resolve().parent))
    if is_module:
        sys.modules.pop(words[1], None)
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
