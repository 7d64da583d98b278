"""--listen HOST:PORT of commands that serve: parsed, resolved, and whether only this machine can reach it."""

from __future__ import annotations

import ipaddress
import re
import socket
from dataclasses import dataclass

from ..errors import ArgumentError

_ADDRESS = re.compile(r"(?:\[(?P<six>[^\[\]]+)\]|(?P<host>[^\[\]:]+)):(?P<port>\d{1,5})")


@dataclass(frozen=True, slots=True)
class Address:
    """Where to listen: as the user typed it, and as a socket address."""

    text: str
    family: socket.AddressFamily
    sockaddr: tuple[str, int]

    @classmethod
    def parse(cls, text: str) -> Address:
        """Return the address of "HOST:PORT" or "[IPV6]:PORT"."""
        match = _ADDRESS.fullmatch(text.strip())
        if not match or int(match["port"]) > 0xFFFF:
            raise ArgumentError(
                f"--listen {text} is not an address",
                why="an address is HOST:PORT, with a port up to 65535; an IPv6 address needs brackets",
                fix="e.g. --listen 127.0.0.1:9400 or --listen '[::1]:9400'",
            )
        host, port = match["six"] or match["host"], int(match["port"])
        try:
            infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        except (socket.gaierror, UnicodeError) as exc:
            raise ArgumentError(
                f"--listen {text}: unknown host {host!r}",
                why=str(exc),
                fix="give an address of this machine: 127.0.0.1:9400",
            ) from exc
        family, _, _, _, sockaddr = infos[0]
        return cls(text, family, (str(sockaddr[0]), port))

    @property
    def loopback(self) -> bool:
        """Return whether only this machine can reach it."""
        return ipaddress.ip_address(self.sockaddr[0].partition("%")[0]).is_loopback
