"""Types of settings: numbers with units, texts with a pattern, URLs, paths and networks.

A type is a Python type with msgspec's `Meta` in `Annotated`. What msgspec does not know stands in `Meta.extra`:
`rule` (the type in words, for errors), `units`, `secret`, `path`, `read` and `one_or_more`. `smetric.config.load` reads
values of these types.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Sequence
from typing import Annotated, ClassVar, TypeVar
from urllib.parse import urlsplit

from msgspec import Meta, Struct

#: Unit to seconds.
SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
#: Unit to bytes.
BYTES = {"B": 1.0, "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30, "kB": 1e3, "MB": 1e6, "GB": 1e9}

_QUANTITY = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,9})?)\s*([A-Za-z]+)\Z")
#: Units in which values are printed, the largest first.
_SHOWN = ("h", "m", "s", "ms", "us", "GiB", "MiB", "KiB", "B")


class Section(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of a table of settings, each field an `Annotated` type with a `doc`.

    `shorthand` names the setting that a bare word stands for, where the section may be written as one.
    """

    shorthand: ClassVar[str] = ""


def doc(sentence: str) -> Meta:
    """Return the documentation of a setting: one or more sentences, also in the JSON Schema and the manual."""
    return Meta(description=sentence)


def read_quantity(text: str, units: dict[str, float]) -> float:
    """Return `250ms` or `32MiB` as a number of the base unit; raise ValueError for anything else."""
    match = _QUANTITY.match(text)
    if match is None or match[2] not in units:
        raise ValueError(text)
    return float(match[1]) * units[match[2]]


def show_quantity(value: float, units: dict[str, float]) -> str:
    """Return *value* in the largest unit that leaves a whole number, else in the smallest one."""
    shown = [unit for unit in _SHOWN if unit in units]
    for unit in shown:
        count = value / units[unit]
        if count >= 1 and abs(count - round(count)) < 1e-9:
            return f"{round(count)}{unit}"
    if value == 0:
        return f"0{next(unit for unit, base in units.items() if base == 1)}"
    return f"{value / units[shown[-1]]:.6f}".rstrip("0").rstrip(".") + shown[-1]


def _quantity(noun: str, units: dict[str, float], low: str, high: str) -> Meta:
    rule = f"{noun} with its unit from {low} to {high}"
    return Meta(ge=read_quantity(low, units), le=read_quantity(high, units), extra={"units": units, "rule": rule})


def duration(low: str = "1ms", high: str = "24h") -> Meta:
    """Return the type of a time between two bounds; its value is in seconds."""
    return _quantity("a time", SECONDS, low, high)


def size(low: str, high: str) -> Meta:
    """Return the type of a number of bytes between two bounds."""
    meta = _quantity("a size", BYTES, low, high)
    return Meta(ge=int(meta.ge or 0), le=int(meta.le or 0), extra=meta.extra)


def text(pattern: str, rule: str, *, empty: bool = False, **extra: object) -> Meta:
    """Return the type of a text that *pattern* matches from end to end.

    Args:
        pattern: regular expression, without anchors.
        rule: the pattern in words, for errors.
        empty: whether the empty text fits too.
        extra: more for `Meta.extra`.
    """
    # `$` alone would also match before a trailing line feed.
    anchored = rf"^(?:{pattern}){'?' if empty else ''}$(?!\n)"
    return Meta(pattern=anchored, extra={"rule": rule, "empty": empty, **extra})


Network = ipaddress.IPv4Network | ipaddress.IPv6Network

#: Metadata services of clouds outside the link-local addresses. They hand credentials to callers within.
_METADATA = frozenset(
    map(
        ipaddress.ip_address,
        ("100.100.100.200", "168.63.129.16", "192.0.0.192", "fd00:ec2::254", "fd20:ce::254", "fd00:c1::a9fe:a9fe"),
    )
)
#: Ranges whose last 32 bits are an IPv4 address that may receive what is sent there: IPv4-mapped, -translated and
#: -compatible addresses, and NAT64.
_EMBEDDING = tuple(map(ipaddress.IPv6Network, ("::ffff:0:0/96", "::ffff:0:0:0/96", "::/96", "64:ff9b::/96")))
#: Address at which a listener on all addresses is reached.
_LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "::1"}
#: What other readers of URLs take for an IPv4 address: 127.1, 2130706433, 0x7f.0.0.1, 0177.0.0.1.
_NUMERIC_HOST = re.compile(r"(?:.*\.)?(?:[0-9]+|0x[0-9a-f]*)\.?\Z", re.IGNORECASE)
#: A label of a host name has 1 to 63 characters; other names cannot be looked up.
_LABELS = r"(?!\.|.*(?:\.\.|[^.]{64}))"
_HOST = re.compile(_LABELS + r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,252}[A-Za-z0-9])?\Z")
_URL_RULE = "an http or https URL without a path, such as http://10.0.0.7:8000"
_URL_PATTERN = r"https?://[^/@?#\s]+/?"


def base_url(text: str) -> str:
    """Return the URL *text* with scheme and host in lower case and without its final slash.

    Raises:
        ValueError: it is not an `http` or `https` URL of a host alone. The message is the rule it breaks; where *text*
            may hold a password, a second argument stands for it.
    """
    if "@" in text:
        raise ValueError(f"{_URL_RULE}, and no user or password in it", "one with an @")
    try:
        parts = urlsplit(text)
        host, port = parts.hostname or "", parts.port
        address = ipaddress.IPv6Address(host) if ":" in host else None
    except ValueError as error:
        raise ValueError(_URL_RULE) from error
    if address is not None:
        if address.ipv4_mapped is not None:
            raise ValueError(f"{_URL_RULE}; write {address.ipv4_mapped} for this host")
        host = f"[{address}]"
    elif _NUMERIC_HOST.match(host) and not is_address(host):
        raise ValueError(f"{_URL_RULE}; an IPv4 address is four decimal numbers")
    elif host and not _HOST.match(host):
        raise ValueError(
            f"{_URL_RULE}; a host is A-Z a-z 0-9 _ -, 1 to 63 of them between dots, and begins and ends with a letter "
            "or a digit"
        )
    # urlsplit drops tabs and line breaks silently, so the text itself is checked as well.
    is_base = host and port != 0 and parts.scheme in ("http", "https") and parts.path in ("", "/")
    if not is_base or re.search(r"[?#\s]", text):
        raise ValueError(_URL_RULE)
    return f"{parts.scheme}://{host}" if port is None else f"{parts.scheme}://{host}:{port}"


def _network(text: str) -> str:
    try:
        return str(ipaddress.ip_network(text))
    except ValueError as error:
        raise ValueError("a network such as 10.0.0.0/8, or an address (host bits zero)") from error


def networks(texts: Iterable[str]) -> tuple[Network, ...]:
    """Return the values of `NetworkText` as networks."""
    return tuple(map(ipaddress.ip_network, texts))


def host_and_port(url: str) -> str:
    """Return `10.0.0.7:8000` for a `BaseUrl`, with the default port of its scheme if it names none."""
    parts = urlsplit(url)
    return parts.netloc if parts.port else f"{parts.netloc}:{443 if parts.scheme == 'https' else 80}"


def local_url(host: str, port: int) -> str:
    """Return the URL that reaches a listener on *host* and *port* of this machine."""
    reached = _LOOPBACK.get(host, host)
    return f"http://[{reached}]:{port}" if ":" in reached else f"http://{reached}:{port}"


def is_address(host: str) -> bool:
    """Return whether *host* is an IP address, without brackets."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def odd_address(text: str, allowed: Sequence[Network]) -> str:
    """Return why the address *text* is no place for an instance, or an empty text.

    A URL, or a name that resolves to such an address, would make the router ask for what only this machine may.
    Addresses in *allowed* are fine.
    """
    address = ipaddress.ip_address(text.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address):
        if address.sixtofour is not None:
            address = address.sixtofour
        elif not address.is_loopback and any(address in network for network in _EMBEDDING):
            address = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    if any(address.version == network.version and address in network for network in allowed):
        return ""
    for is_odd, reason in (
        (address in _METADATA, "the address of a cloud's metadata service"),
        (address.is_link_local, "a link-local address, as are those of clouds' metadata services"),
        (address.is_multicast, "a multicast address"),
        (address.is_unspecified, "the unspecified address"),
        (address.version == 4 and address.is_reserved, "a reserved address"),
    ):
        if is_odd:
            return reason
    return ""


T = TypeVar("T")

#: A list that may also be written as its only item.
OneOrMore = Annotated[tuple[T, ...], Meta(extra={"one_or_more": True})]
#: The value of a policy's parameter; the parameter's own declaration says what fits.
ParamValue = float | str | bool

BaseUrl = Annotated[str, Meta(extra={"rule": _URL_RULE, "read": base_url, "pattern": f"^{_URL_PATTERN}$"})]
OptionalUrl = Annotated[
    str, Meta(extra={"rule": _URL_RULE, "read": base_url, "pattern": f"^(?:{_URL_PATTERN})?$", "empty": True})
]
NetworkText = Annotated[str, Meta(extra={"rule": "a network such as 10.0.0.0/8, or an address", "read": _network})]

_PATH = r"[^\0]{1,4096}"
_POLICY_RULE = "the name of a shipped policy, or the path of a .policy file"
Folder = Annotated[str, text(_PATH, "the path of a folder", path="file")]
OptionalFolder = Annotated[str, text(_PATH, "the path of a folder", empty=True, path="file")]
OptionalFile = Annotated[str, text(_PATH, "the path of a file", empty=True, path="file")]
PolicyRef = Annotated[str, text(_PATH, _POLICY_RULE, path="policy")]
OptionalPolicy = Annotated[str, text(_PATH, _POLICY_RULE, empty=True, path="policy")]


def _secret(least: int) -> Meta:
    rule = f"{least} to 256 printable ASCII characters without spaces"
    return text(f"[\\x21-\\x7e]{{{least},256}}", rule, empty=True, secret=True)


Secret = Annotated[str, _secret(16)]
#: An engine's key; its length is the engine's choice.
ApiKey = Annotated[str, _secret(1)]

Model = Annotated[str, text(r"[\x21-\x7e]{1,256}", "a model name of 1 to 256 printable ASCII characters")]
Tenant = Annotated[str, text(r"[\x20-\x7e]{1,256}", "the name of a tenant, 1 to 256 printable ASCII characters")]
InstanceId = Annotated[str, text(r"[A-Za-z0-9._:\[\]-]{1,128}", "1 to 128 of A-Z a-z 0-9 . _ : [ ] -")]
Label = Annotated[str, text(r"[A-Za-z0-9._:/\[\]-]{0,128}", "at most 128 of A-Z a-z 0-9 . _ : / [ ] -", empty=True)]
RouteName = Annotated[str, text(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}", "at most 64 of A-Z a-z 0-9 _ . -", empty=True)]
LmcacheId = Annotated[str, text(r"[\x21-\x7e]{1,256}", "an LMCache instance id of 1 to 256 printable ASCII characters")]
Topic = Annotated[str, text(r"[\x21-\x7e]{0,256}", "at most 256 printable ASCII characters", empty=True)]
HeaderName = Annotated[
    str, text(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{0,64}", "the name of a header, of at most 64 characters", empty=True)
]
Host = Annotated[str, text(_LABELS + r"[A-Za-z0-9.:_-]{1,253}", "a host name or an IP address")]
Port = Annotated[int, Meta(ge=0, le=65535)]
ZmqEndpoint = Annotated[
    str,
    text(
        r"tcp://\S{1,255}:(?:[0-9]{1,5}|[0-9]?\{port\})|ipc://\S{1,255}",
        "a ZeroMQ address such as tcp://{host}:5557",
        empty=True,
    ),
]
TraceUrl = Annotated[
    str,
    text(
        r"https?://[\x21-\x7e]{0,1000}\{trace_id\}[\x21-\x7e]{0,1000}",
        "an http or https URL with {trace_id} in it, such as http://localhost:6006/redirects/traces/{trace_id}",
        empty=True,
    ),
]
