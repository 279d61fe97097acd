"""TLS of a listener: certificate, its reload, handshakes under way."""

from __future__ import annotations

import ssl
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import cast

import structlog

from smetric.errors import ConfigError
from smetric.files import require_regular, state_of

log = structlog.get_logger("smetric.tls")


class Tls:
    """Certificate of a listener that speaks TLS 1.2 or later and HTTP/1.1.

    Args:
        cert_file: the certificate and its chain, in PEM.
        key_file: its key; empty if *cert_file* holds that too.

    Raises:
        ConfigError: certificate or key cannot be used.
    """

    def __init__(self, cert_file: str, key_file: str) -> None:
        self._cert_file = cert_file
        self._key_file = key_file
        self._files = [Path(name) for name in (cert_file, key_file) if name]
        self._seen = self._state()
        self._acting = self._load()
        self._handshakes: weakref.WeakSet[Handshake] = weakref.WeakSet()

    @property
    def folders(self) -> set[Path]:
        """Folders of the files."""
        return {file.parent for file in self._files}

    def handshakes(self) -> int:
        """Return the number of handshakes under way."""
        return len(self._handshakes)

    def context(self, has_room: Callable[[], bool]) -> ssl.SSLContext:
        """Return the context for an event loop; connections are closed before their handshake if not *has_room*."""
        return _Front(self, has_room)

    def begin(self, incoming: ssl.MemoryBIO, outgoing: ssl.MemoryBIO) -> ssl.SSLObject:
        """Begin a connection with the current certificate."""
        handshake = cast(Handshake, self._acting.wrap_bio(incoming, outgoing, server_side=True))
        handshake.under_way = self._handshakes
        self._handshakes.add(handshake)
        return handshake

    def refresh(self) -> None:
        """Read the files again if they have changed; the old certificate stays if they cannot be used."""
        state = self._state()
        if state == self._seen:
            return
        self._seen = state
        try:
            self._acting = self._load()
        except ConfigError as error:
            log.error("smetric.tls.kept", error=str(error))
        else:
            log.info("smetric.tls.reloaded", cert_file=self._cert_file)

    def _state(self) -> list[tuple[int, int, int]] | None:
        """Return the state of the files; None while one is missing."""
        try:
            return [state_of(file) for file in self._files]
        except OSError:
            return None

    def _load(self) -> ssl.SSLContext:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.set_alpn_protocols(["http/1.1"])
        context.sslobject_class = Handshake
        try:
            for file in self._files:
                require_regular(file)
            context.load_cert_chain(self._cert_file, self._key_file or None, password=_no_password)
        except (OSError, ValueError) as error:
            if isinstance(error, ssl.SSLError):
                reason = error.reason or "no certificate or no key is there"
            else:
                reason = getattr(error, "strerror", None) or str(error)
            files = ", ".join(map(str, self._files))
            raise ConfigError(
                f"listen.cert_file: cannot be used ({reason.lower().replace('_', ' ')}): {files}; a certificate and "
                "its key in PEM, without a password, are needed"
            ) from None
        return context


class Handshake(ssl.SSLObject):
    """TLS of one connection; its handshake is under way until it succeeds or the connection ends."""

    under_way: weakref.WeakSet[Handshake]

    def do_handshake(self) -> None:
        """Continue with what has arrived; raises if more is needed."""
        super().do_handshake()
        self.under_way.discard(self)


class _Front(ssl.SSLContext):
    """Context of an event loop that begins each connection with the certificate that is current then."""

    _tls: Tls
    _has_room: Callable[[], bool]

    def __new__(cls, tls: Tls, has_room: Callable[[], bool]) -> _Front:
        front = super().__new__(cls, ssl.PROTOCOL_TLS_SERVER)
        front._tls = tls
        front._has_room = has_room
        return front

    def wrap_bio(
        self,
        incoming: ssl.MemoryBIO,
        outgoing: ssl.MemoryBIO,
        server_side: bool = False,
        server_hostname: str | bytes | None = None,
        session: ssl.SSLSession | None = None,
    ) -> ssl.SSLObject:
        """Begin a connection.

        Raises:
            ssl.SSLError: there are too many; the event loop closes it.
        """
        if not self._has_room():
            raise ssl.SSLError("too many connections")
        return self._tls.begin(incoming, outgoing)


def _no_password() -> str:
    """Refuse an encrypted key; OpenSSL would ask the terminal."""
    raise ValueError("the key is encrypted")
