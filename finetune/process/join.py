"""Wait until every machine of a job has started, and say which one is missing."""

import datetime
import socket
import threading
import time
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import static_tcp_rendezvous as static

from finetune.errors import FinetuneError

SECONDS_BETWEEN_ATTEMPTS = 0.5
LATER = "start it, or give it more time: --join-timeout MINUTES"


def name_missing_machines() -> None:
    """Let torch's agents of several machines wait for each other by name, for their timeout.

    torch (2.13) waits for a number of clients, twice as long as asked where no connection is
    accepted, and ends with a traceback.
    """
    join = static.StaticTCPRendezvous.next_rendezvous

    def next_rendezvous(self: Any) -> Any:
        if self.world_size > 1 and self._store is None:
            self._store = _joined(
                self.master_addr, self.master_port, self.rank, self.world_size, self.timeout
            )
        return join(self)

    static.StaticTCPRendezvous.next_rendezvous = next_rendezvous


def _joined(
    host: str, port: int, rank: int, machines: int, timeout: datetime.timedelta
) -> dist.Store:
    """The store of a job that all machines have joined.

    Raises:
        FinetuneError: some have not within the timeout, or something else answers at the address.
    """
    until = time.monotonic() + timeout.total_seconds()
    if rank:
        _reach(host, port, until)
    store = _opened(host, port, rank == 0, until)
    store.set(f"machine/{rank}", socket.gethostname())
    keys = [f"machine/{each}" for each in range(machines)]
    while not store.check(keys):  # torch's own wait prints its failure
        if time.monotonic() > until:
            missing = [str(each) for each, key in enumerate(keys) if not store.check([key])]
            raise FinetuneError(
                f"--num_machines {machines}: --machine_rank {', '.join(missing)} did not join at "
                f"{host}:{port} within {timeout.total_seconds():g} s; {LATER}"
            )
        time.sleep(SECONDS_BETWEEN_ATTEMPTS)
    return store


def _opened(host: str, port: int, is_master: bool, until: float) -> dist.Store:
    """The store at an address, on machine 0, or a client of it.

    Raises:
        FinetuneError: the port is taken, or it is not such a store that answers.
    """
    outcome: list[dist.Store | str] = []

    def open_store() -> None:
        try:
            outcome.append(
                static.TCPStore(
                    host, port, is_master=is_master, timeout=_left(until), wait_for_workers=False,
                    multi_tenant=True,
                )
            )  # fmt: skip
        except dist.DistError as error:
            outcome.append(str(error).partition("\n")[0])

    # In a thread, because torch waits for the first answer of a server forever.
    thread = threading.Thread(target=open_store, daemon=True)
    thread.start()
    thread.join(_left(until).total_seconds())
    store = outcome[0] if outcome else "it does not answer as one"
    if isinstance(store, str):
        raise FinetuneError(
            f"--main_process_ip {host} --main_process_port {port}: no rendezvous of this job "
            f"({store}); give every machine the address of machine 0 and a free port there"
        )
    return store


def _left(until: float) -> datetime.timedelta:
    return datetime.timedelta(seconds=max(1.0, until - time.monotonic()))


def _reach(host: str, port: int, until: float) -> None:
    """Wait until a port accepts a connection."""
    while True:
        try:
            socket.create_connection((host, port), timeout=_left(until).total_seconds()).close()
            return
        except OSError as error:
            if time.monotonic() > until:
                raise FinetuneError(
                    f"--machine_rank 0 cannot be reached at {host}:{port} (--main_process_ip, "
                    f"--main_process_port): {error.strerror or error}; {LATER}"
                ) from None
        time.sleep(SECONDS_BETWEEN_ATTEMPTS)
