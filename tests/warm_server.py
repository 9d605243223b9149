"""An interpreter whose processes are forks of one that has imported everything.

A command imports PyTorch and the libraries around it for longer than it trains a tiny model. Here
it is a process of its own all the same, in a session of its own, with its own variables, folder and
files, and ends as it would: only its imports are there already. What it starts by `sys.executable`,
launchers and their workers, is such a process too. `conftest.warm_python` starts the server.

    python warm_server.py SOCKET INTERPRETER    until the process that started it has gone
"""

import atexit
import itertools
import json
import os
import runpy
import selectors
import signal
import socket
import sys
import threading
import traceback
import types
from pathlib import Path
from typing import Any, NoReturn

REQUEST = 1 << 20
"""Most bytes of a request: words, folder and variables."""

INTERPRETER = """#!{python} -SE
import json, os, signal, socket, sys
words = sys.argv[1:]
if not {{"-m", "-c", "-u"}}.intersection(words[:2]) or "-I" in words[:1]:
    os.execv({python!r}, [{python!r}, *words])
asked = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
asked.connect({address!r})
request = dict(python=sys.argv[0], words=words, folder=os.getcwd(), variables=dict(os.environ))
socket.send_fds(asked, [json.dumps(request).encode()], [0, 1, 2])
process = int(asked.recv(64))
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, lambda number, _: os.kill(process, number))
status = int(asked.recv(64))
if status < 0:
    if -status != signal.SIGKILL:
        signal.signal(-status, signal.SIG_DFL)
    os.kill(os.getpid(), -status)
os._exit(status)
"""
"""Takes the words of `python`, hands signals on, and ends as the process that it asked for ends.

A file that no agent starts (with `-u`) may count on nothing being imported: it gets an interpreter
of its own.
"""


def main(address: str, interpreter: Path) -> None:
    from finetune.process.start import collecting_later, compiling_later, read_models_once

    with collecting_later(), compiling_later():
        read_models_once()
        import deepspeed  # noqa: F401
        import transformers.models.llama.modeling_llama  # noqa: F401

        import finetune.cli.main
        import finetune.exporters.export
        import finetune.training.worker  # noqa: F401

    assert len(os.listdir("/proc/self/task")) == 1, "threads are not forked"
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listening.bind(address)
    listening.listen(64)
    listening.settimeout(5)
    interpreter.write_text(INTERPRETER.format(python=sys.executable, address=address))
    interpreter.chmod(0o755)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for a keeper
    print("ready", flush=True)
    started_by = os.getppid()
    while os.getppid() == started_by:
        try:
            connection, _ = listening.accept()
        except TimeoutError:
            continue
        if not os.fork():
            listening.close()
            keep(connection)
        connection.close()


def keep(connection: socket.socket) -> NoReturn:
    """Be the parent of a process that was asked for; who asked and is killed takes it along."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    message, files, _, _ = socket.recv_fds(connection, REQUEST, 3)
    process = os.fork()
    if not process:
        connection.close()
        become(json.loads(message), files)
    for file in files:
        os.close(file)
    connection.send(str(process).encode())
    ended = os.pidfd_open(process)
    ready = selectors.DefaultSelector()
    ready.register(ended, selectors.EVENT_READ)
    ready.register(connection, selectors.EVENT_READ)
    if not any(key.fileobj == ended for key, _ in ready.select()):
        os.kill(process, signal.SIGKILL)
        os._exit(1)
    status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    connection.send(str(status).encode())
    os._exit(0)


def become(request: dict[str, Any], files: list[int]) -> NoReturn:
    """The process that `python WORDS` would be in that folder, with those variables and files."""
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
        run(words, safe)
        status = 0
    except SystemExit as asked:
        status = asked.code if isinstance(asked.code, int) else int(asked.code is not None)
        if isinstance(asked.code, str):
            print(asked.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    end(status)


def run(words: list[str], safe: bool) -> None:
    """`-m MODULE`, `-c CODE` or a file, as the main module."""
    kind = words[0] if words[0] in ("-m", "-c") else "file"
    what, *rest = words if kind == "file" else words[1:]
    sys.argv = ["-c" if kind == "-c" else what, *rest]
    if not safe:
        sys.path.insert(0, str(Path(what).resolve().parent) if kind == "file" else os.getcwd())
    if kind == "-m":
        sys.modules.pop(what, None)
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    elif kind == "file":
        runpy.run_path(what, run_name="__main__")
    else:
        main_module = types.ModuleType("__main__")
        sys.modules["__main__"] = main_module
        exec(compile(what, "<string>", "exec"), vars(main_module))


def end(status: int) -> NoReturn:
    """As an interpreter ends, less taking it down."""
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
