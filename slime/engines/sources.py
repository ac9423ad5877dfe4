"""Connections from several local addresses, so that ports do not bound how many there are to one server."""

from __future__ import annotations

import errno
import socket
from typing import TYPE_CHECKING

import aiohttp

from slime.config.machine import source_addresses

if TYPE_CHECKING:
    from aiohappyeyeballs import AddrInfoType
    from aiohttp.client import ClientRequest, ClientTimeout
    from aiohttp.connector import Connection
    from aiohttp.tracing import Trace

_IP_BIND_ADDRESS_NO_PORT = 24  # of Linux; a port is chosen when the destination is known, not before


class SpreadConnector(aiohttp.TCPConnector):
    """Goes on from the next loopback address when an address has no free port towards a server of this machine.

    A connection is known by both its addresses and ports, so each source address has a whole range of ports
    (``ip_local_port_range``) towards one server. Usual runs, which need one range, connect as any client does.
    """

    def __init__(self, keepalive_seconds: float) -> None:
        super().__init__(socket_factory=self._socket, limit=0, keepalive_timeout=keepalive_seconds)
        self._source: dict[str, int] = {}  # by the server's address: how many loopback addresses are used up

    async def connect(self, req: ClientRequest, traces: list[Trace], timeout: ClientTimeout) -> Connection:
        host = req.url.host or ""
        tries = source_addresses(host)
        while True:
            source, tries = self._source.get(host, 0), tries - 1
            try:
                return await super().connect(req, traces, timeout)
            except aiohttp.ClientConnectorError as error:
                if error.errno != errno.EADDRNOTAVAIL or tries <= 0:
                    raise
                if self._source.get(host, 0) == source:  # no other request has gone on meanwhile
                    self._source[host] = (source + 1) % source_addresses(host)

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
