"""Connections from several loopback addresses, so that free ports do not limit the connections to
one server.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from typing import TYPE_CHECKING

import aiohttp

from slime.config.machine import source_addresses
from slime.engines import local

if TYPE_CHECKING:
    from aiohappyeyeballs import AddrInfoType
    from aiohttp.client import ClientRequest, ClientTimeout
    from aiohttp.client_proto import ResponseHandler
    from aiohttp.connector import Connection
    from aiohttp.tracing import Trace

# Linux: the port is chosen at connect(), so sockets to other servers may share it
_IP_BIND_ADDRESS_NO_PORT = 24


class SpreadConnector(aiohttp.TCPConnector):
    """A connector that changes to the next loopback address when the current one has no free port.

    A connection is identified by the addresses and ports of both ends. So each source address
    provides a whole range of ports (``ip_local_port_range``) for connections to one server on this
    machine. Most runs need one range only, and their sockets are not bound to an address.
    """

    def __init__(self, keepalive_seconds: float) -> None:
        super().__init__(socket_factory=self._socket, limit=0, keepalive_timeout=keepalive_seconds)
        # the number of the current loopback address, by server address
        self._source: dict[str, int] = {}

    async def connect(
        self, req: ClientRequest, traces: list[Trace], timeout: ClientTimeout
    ) -> Connection:
        host = req.url.host or ""
        tries = source_addresses(host)
        while True:
            source = self._source.get(host, 0)
            tries = tries - 1
            try:
                return await super().connect(req, traces, timeout)
            except aiohttp.ClientConnectorError as error:
                if error.errno != errno.EADDRNOTAVAIL or tries <= 0:
                    raise
                # Many requests fail at the same time when ports run out. Only the first of them
                # changes the address.
                if self._source.get(host, 0) == source:
                    self._source[host] = (source + 1) % source_addresses(host)

    async def _create_connection(
        self, req: ClientRequest, traces: list[Trace], timeout: ClientTimeout
    ) -> ResponseHandler:
        """Return a connection to a server of this process, which listens nowhere, or else what
        aiohttp makes.
        """
        opened = local.connection(req.url.host or "", req.url.port or 80)
        if opened is None:
            return await super()._create_connection(req, traces, timeout)
        opened.setblocking(False)
        _, protocol = await asyncio.get_running_loop().create_connection(self._factory, sock=opened)
        return protocol

    def _socket(self, address: AddrInfoType) -> socket.socket:
        family, kind, protocol, _, where = address
        opened = socket.socket(family, kind, protocol)
        try:
            opened.setblocking(False)
            if source := self._source.get(where[0], 0):
                opened.setsockopt(socket.SOL_IP, _IP_BIND_ADDRESS_NO_PORT, 1)
                opened.bind((f"127.0.0.{1 + source}", 0))
        except OSError:
            opened.close()
            raise
        return opened
