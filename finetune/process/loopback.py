"""Run `accelerate launch` with its store on the loopback interface, and forward signals.

`python -m finetune.process.loopback` is `accelerate launch` with two differences. torch (2.13)
binds the store through which processes find each other to every network interface, whatever address
it is given, so that anyone in the same network could read and write it. Here, a store whose address
is the loopback is bound to the loopback only; jobs of several machines use another address and are
not changed. And a signal reaches a single training process, which `accelerate` (1.15) would leave
running; torch's agent replaces these handlers by its own.
"""

import contextlib
import functools
import importlib
import os
import signal
import socket
import sys
from types import FrameType
from typing import Any

from finetune.errors import FinetuneError
from finetune.process.signals import handled_signals

MAKERS = (
    "torch.distributed.rendezvous",
    "torch.distributed.elastic.rendezvous.static_tcp_rendezvous",
)
LOOPBACK = ("127.0.0.1", "localhost")


def listen_on_loopback() -> None:
    """Bind stores that this process creates from now on to their address.

    Uses torch's `master_listen_fd`, by replacing the class in the two modules that create stores:
    the one of torch's agent and the one of `init_process_group`.
    """
    for name in MAKERS:
        module = importlib.import_module(name)  # torch has a function with the first name
        made: Any = vars(module)["TCPStore"]
        if isinstance(made, type):
            setattr(module, "TCPStore", functools.partial(_store, made))  # noqa: B010, of torch


def _store(
    kind: Any,
    host_name: str,
    port: int,
    world_size: int | None = None,
    is_master: bool = False,
    *rest: Any,
    **named: Any,
) -> Any:
    """A store of torch; for a loopback address, with a socket that listens on the loopback only.

    If the port is taken, torch raises its own error, or shares a store of this process.
    """
    if is_master and host_name in LOOPBACK and "master_listen_fd" not in named:
        listening = socket.socket()
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind(("127.0.0.1", port))
            listening.listen(socket.SOMAXCONN)
        except OSError:
            listening.close()
        else:
            port = listening.getsockname()[1]
            named["master_listen_fd"] = listening.detach()
    return kind(host_name, port, world_size, is_master, *rest, **named)


def forward(number: int, _: FrameType | None) -> None:
    """Send a signal to the processes that this one started; without any, end by it."""
    import psutil  # slow

    children = psutil.Process().children()
    for child in children:
        with contextlib.suppress(psutil.Error):
            child.send_signal(number)
    if not children:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


def main() -> None:
    """Run `accelerate launch` with the arguments of this process."""
    for number in handled_signals():
        signal.signal(number, forward)
    from accelerate.commands import launch

    from finetune.process import error_report, join

    listen_on_loopback()
    join.name_missing_machines()
    try:
        launch.main()
    except FinetuneError as error:
        sys.exit(error_report.report(error))


if __name__ == "__main__":
    main()
