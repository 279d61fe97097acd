"""Settings of the ports: who may come, with how much, for how long, and how serving ends."""

from __future__ import annotations

from dataclasses import dataclass

from smetric.config.address import LABELS, PathRef
from smetric.config.kind import Choice, Integer, Secret, Text
from smetric.config.quantity import Duration, Size
from smetric.config.section import setting
from smetric.config.text import SECRET_FILE

_HOST = Text(LABELS + r"[A-Za-z0-9.:_-]{1,253}", "a host name or an IP address")
_PORT = Integer(0, 65535)


@dataclass(frozen=True, slots=True, kw_only=True)
class Listen:
    """Where clients connect."""

    host: str = setting(_HOST, "Address that serves `/v1/…`, `/healthz` and `/readyz`; `0.0.0.0` for all.", "127.0.0.1")
    port: int = setting(_PORT, "Its port; 0 takes a free one.", 8080)
    cert_file: str = setting(
        PathRef(empty=True, what="a file"),
        "A file with its certificate and those that vouch for it (PEM), read again when it changes: clients then come "
        "by TLS alone. Plain HTTP when not set.",
        "",
    )
    key_file: str = setting(
        PathRef(empty=True, what="a file"), "A file with that certificate's key (PEM); not set: it is in the other.", ""
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Admin:
    """Where operators connect."""

    host: str = setting(_HOST, "Address that serves `/metrics`, health and `/admin/…`; keep it private.", "127.0.0.1")
    port: int = setting(_PORT, "Its port; 0 takes a free one.", 9464)
    token: str = setting(
        Secret(),
        "What `/admin/…` is opened with, as `Authorization: Bearer …`; needed where `host` is not loopback.",
        "",
    )
    token_file: str = setting(SECRET_FILE, "A file that holds it; read again when it changes.", "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Forward:
    """Sending a request to the chosen instance."""

    connect_timeout: float = setting(Duration("10ms", "1m"), "Longest wait for a connection.", 2.0)
    first_byte_timeout: float = setting(
        Duration("100ms", "1h"),
        "Longest wait for the first byte of the response, queueing and prefill included.",
        300.0,
    )
    idle_timeout: float = setting(Duration("100ms", "1h"), "Longest silence within a response.", 60.0)
    max_body: int = setting(Size("1KiB", "1GiB"), "Largest request body; a larger one is answered 413.", 32 << 20)


@dataclass(frozen=True, slots=True, kw_only=True)
class Drain:
    """Ending."""

    announce: float = setting(
        Duration("0s", "10m"),
        "Time after SIGTERM in which `/readyz` says 503 but clients are still served, so that a load balancer notices.",
        0.0,
    )
    deadline: float = setting(
        Duration("0s", "1h"), "Time that running requests get after that before they are cut off.", 180.0
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What clients may ask for, and how many of them there may be."""

    max_headers: int = setting(Integer(1, 1000), "Most header lines of a request.", 100)
    max_header_bytes: int = setting(Size("1KiB", "1MiB"), "Most bytes of a request's head.", 32 << 10)
    body_timeout: float = setting(Duration("100ms", "1h"), "Longest time a request body may take to arrive.", 60.0)
    send_timeout: float = setting(Duration("100ms", "1h"), "Longest wait for a client that does not read.", 60.0)
    head_timeout: float = setting(Duration("100ms", "1h"), "Longest time a request's head may take to arrive.", 10.0)
    idle_timeout: float = setting(Duration("100ms", "1h"), "Time a connection without a request is kept.", 10.0)
    max_connections: int = setting(
        Integer(0, 1_000_000),
        "Most connections of clients; 0, and at most: half as many as open files, less a few.",
        0,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenants:
    """Keeping apart, in the engines, the tenants that `tenant_header` names."""

    cache_salt: str = setting(
        Choice("client", "tenant"),
        "client: it passes as the client sends it. tenant: it is set from the tenant's name and the secret, so that "
        "tenants share no prefix cache and cannot guess each other's prompts by its timing; requests of no tenant are "
        "refused.",
        "client",
    )
    secret: str = setting(Secret(), "What those salts are made with; the same in all routers.", "")
    secret_file: str = setting(SECRET_FILE, "A file that holds it; read again when it changes.", "")
