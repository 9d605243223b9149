"""HTTP connections that are closed if a request's headers do not arrive in time."""

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol

HEADER_SECONDS = 20.0
"""Seconds in which the headers of a request must arrive."""


class TimedConnection(H11Protocol):
    """A connection of uvicorn, which (0.54) waits without limit for the rest of the headers.

    Clients that send them slowly could otherwise occupy all file descriptors of the server.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._since = self.loop.time()
        self._limit()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)  # cancels the timer
        self._limit()

    def on_response_complete(self) -> None:
        self._since = self.loop.time()
        super().on_response_complete()  # starts the timer of an idle connection

    def _limit(self) -> None:
        waiting = self.cycle is None or self.cycle.response_complete
        if waiting and self.timeout_keep_alive_task is None and not self.transport.is_closing():
            self.timeout_keep_alive_task = self.loop.call_at(
                self._since + HEADER_SECONDS, self.timeout_keep_alive_handler
            )
