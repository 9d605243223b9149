"""Keep the ports of a job on one machine closed to others: `python -m finetune.process.loopback` launches.

It is `accelerate launch` with one difference. torch (2.13) binds the store through which processes
find each other to every interface of the machine, whatever address it is given; anyone in the same
network could read and write it. Here a store whose address is the loopback is bound to that alone.
A job of several machines names another address, and is left as it is.
"""

import functools
import importlib
import socket
from typing import Any

MAKERS = (
    "torch.distributed.rendezvous",
    "torch.distributed.elastic.rendezvous.static_tcp_rendezvous",
)
LOOPBACK = ("127.0.0.1", "localhost")


def listen_on_loopback() -> None:
    """Let stores that this process makes from now on listen where their address says.

    torch's own way, `master_listen_fd`, is reached by replacing the class in the two modules that
    make a store: that of torch's agent, and that of `init_process_group`.
    """
    for name in MAKERS:
        module = importlib.import_module(name)  # a function of torch has the name of the first
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
    """A store as torch makes it, given a socket that listens on the loopback where that is meant.

    A port that is taken is refused by torch in its own words; one of this process is shared.
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


def main() -> None:
    """`accelerate launch` with the words of this process."""
    from accelerate.commands import launch

    listen_on_loopback()
    launch.main()


if __name__ == "__main__":
    main()
