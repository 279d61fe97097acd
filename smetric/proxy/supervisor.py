"""What a supervisor such as systemd hands over, sockets that listen already, and what it is told: when we are ready.

A socket that is handed over outlives each process that serves it, so that one process can take over from another and
no connection is refused. Sockets of our own are opened in `server.py`.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping

import structlog

from smetric.errors import ConfigError

log = structlog.get_logger("smetric.supervisor")

#: The first descriptor that is handed over (sd_listen_fds(3)).
FIRST_FD = 3
DATA, ADMIN = "data", "admin"


def handed_over(environ: Mapping[str, str], pid: int) -> dict[str, socket.socket]:
    """The listening sockets that the supervisor passed to the process *pid*, by port: `data`, and maybe `admin`.

    Raises:
        ConfigError: there are sockets this router has no use for, or what was passed is no listening TCP socket.
    """
    if environ.get("LISTEN_PID") != str(pid):
        return {}
    count = environ.get("LISTEN_FDS", "")
    if count not in ("1", "2"):
        raise ConfigError(f'LISTEN_FDS: expected 1 or 2 sockets, for data and admin, got "{count[:80]}"')
    if count == "1":
        names = [DATA]
    else:
        names = environ.get("LISTEN_FDNAMES", "").split(":")
        if sorted(names) != [ADMIN, DATA]:
            raise ConfigError(
                "LISTEN_FDNAMES: of two sockets, name one data and one admin (FileDescriptorName= of a socket unit)"
            )
    return {name: _listening(FIRST_FD + number, name) for number, name in enumerate(names)}


def _listening(fd: int, name: str) -> socket.socket:
    try:
        sock = socket.socket(fileno=fd)
        listens = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) and sock.type == socket.SOCK_STREAM
    except OSError as error:
        raise ConfigError(f"LISTEN_FDS: descriptor {fd} ({name}) is no socket: {error.strerror}") from error
    if not listens or sock.family not in (socket.AF_INET, socket.AF_INET6):
        sock.close()
        raise ConfigError(f"LISTEN_FDS: descriptor {fd} ({name}) is not a TCP socket that listens")
    sock.setblocking(False)
    os.set_inheritable(fd, False)
    return sock


def notify(environ: Mapping[str, str], state: str) -> None:
    """Tell the supervisor *state*, such as `READY=1` (sd_notify(3)); nothing where none has asked to be told."""
    path = environ.get("NOTIFY_SOCKET", "")
    if not path:
        return
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
            sock.setblocking(False)
            sock.connect("\0" + path[1:] if path.startswith("@") else path)
            sock.send(state.encode())
    except OSError as error:
        log.warning("smetric.supervisor.not_told", state=state, error=error.strerror or str(error))
