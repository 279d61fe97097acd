"""Kinds for what points elsewhere: the URL of an instance, a network, a policy."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from typing import Any
from urllib.parse import SplitResult, urlsplit

from smetric.config.kind import Kind, interpolated, scalar_of
from smetric.config.raw import Raw, Scalar, wrong
from smetric.resources import is_policy_path

Network = ipaddress.IPv4Network | ipaddress.IPv6Network

#: Where clouds hand credentials to whoever asks from within, beside the link-local addresses.
_METADATA = frozenset(
    map(
        ipaddress.ip_address,
        ("100.100.100.200", "168.63.129.16", "192.0.0.192", "fd00:ec2::254", "fd20:ce::254", "fd00:c1::a9fe:a9fe"),
    )
)
#: Of these addresses the last 32 bits are an IPv4 address, to which what is sent there may be brought: IPv4-mapped,
#: -translated and -compatible ones, and those of NAT64.
_CLOTHES = tuple(map(ipaddress.IPv6Network, ("::ffff:0:0/96", "::ffff:0:0:0/96", "::/96", "64:ff9b::/96")))
#: What other readers of URLs take for an IPv4 address: 127.1, 2130706433, 0x7f.0.0.1, 0177.0.0.1.
_NUMBER = re.compile(r"(?:.*\.)?(?:[0-9]+|0x[0-9a-f]*)\.?\Z", re.IGNORECASE)
#: What stands between two dots of a host's name has 1 to 63 characters; others cannot even be looked up.
LABELS = r"(?!\.|.*(?:\.\.|[^.]{64}))"
_HOST = re.compile(LABELS + r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,252}[A-Za-z0-9])?\Z")


class BaseUrl(Kind[str]):
    """An `http` or `https` URL of a host alone: no user info, path, query or fragment. Its value has no final slash.

    Args:
        empty: nothing at all may stand there too.
    """

    _RULE = "an http or https URL without a path, such as http://10.0.0.7:8000"

    def __init__(self, *, empty: bool = False) -> None:
        self._empty = empty

    def parse(self, raw: Raw, name: str) -> str:
        """The URL, scheme and host in lower case."""
        if self._empty and isinstance(raw, Scalar) and not raw.text:
            return ""
        text = scalar_of(raw, name, self._RULE).text
        if "@" in text:  # what stands before it may be a password
            raise wrong(raw, name, f"{self._RULE}, and no user or password in it", got="one with an @")
        try:
            parts = urlsplit(text)
            host, port = parts.hostname or "", parts.port
            if ":" in host:
                address = ipaddress.IPv6Address(host)
                if address.ipv4_mapped is not None:
                    raise wrong(raw, name, f"{self._RULE}; write {address.ipv4_mapped} for this host")
                host = f"[{address}]"
            elif _NUMBER.match(host) and not is_address(host):
                raise wrong(raw, name, f"{self._RULE}; an IPv4 address is four decimal numbers")
            elif host and not _HOST.match(host):
                raise wrong(
                    raw,
                    name,
                    f"{self._RULE}; a host is A-Z a-z 0-9 _ -, 1 to 63 of them between dots, and begins and ends "
                    "with a letter or a digit",
                )
        except ValueError as error:
            raise wrong(raw, name, self._RULE) from error
        # urlsplit drops tabs and line breaks silently, so the text itself is looked at as well
        if (
            not host
            or port == 0
            or parts.scheme not in ("http", "https")
            or parts.path not in ("", "/")
            or re.search(r"[?#\s]", text)
        ):
            raise wrong(raw, name, self._RULE)
        return f"{parts.scheme}://{host}" if port is None else f"{parts.scheme}://{host}:{port}"

    def schema(self) -> dict[str, Any]:
        """A string."""
        url = r"https?://[^/@?#\s]+/?"
        return interpolated({"type": "string", "pattern": f"^(?:{url})?$" if self._empty else f"^{url}$"})


def port_of(parts: SplitResult) -> int:
    """The port of a URL in its *parts*: where it names none, the one that its scheme stands for."""
    return parts.port or (443 if parts.scheme == "https" else 80)


def host_and_port(url: str) -> str:
    """Of a `BaseUrl`: `10.0.0.7:8000`, with the port that its scheme stands for where it names none."""
    parts = urlsplit(url)
    return parts.netloc if parts.port else f"{parts.netloc}:{port_of(parts)}"


def odd_host(url: str, allowed: Sequence[Network]) -> str:
    """Why the host of *url* is no place for an instance, if it is an address; empty for nothing to say."""
    host = urlsplit(url).hostname or ""
    return odd_address(host, allowed) if is_address(host) else ""


def odd_address(text: str, allowed: Sequence[Network]) -> str:
    """Why the address *text* is no place for an instance, unless one of *allowed* holds it; empty for nothing to say.

    A URL, or a name that leads there, would make the router ask for what only this machine may.
    """
    address = ipaddress.ip_address(text.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address) and (within := _within(address)) is not None:
        address = within
    if any(address.version == network.version and address in network for network in allowed):
        return ""
    for is_so, reason in (
        (address in _METADATA, "the address of a cloud's metadata service"),
        (address.is_link_local, "a link-local address, as those of clouds' metadata services are"),
        (address.is_multicast, "a multicast address"),
        (address.is_unspecified, "the unspecified address"),
        (address.version == 4 and address.is_reserved, "a reserved address"),
    ):
        if is_so:
            return reason
    return ""


def _within(address: ipaddress.IPv6Address) -> ipaddress.IPv4Address | None:
    """The IPv4 address in *address*; None where there is none."""
    if address.sixtofour is not None:
        return address.sixtofour
    if address.is_loopback or not any(address in network for network in _CLOTHES):
        return None
    return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)


def is_address(host: str) -> bool:
    """Whether *host* is an IP address, without brackets."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


class NetworkRange(Kind[Network]):
    """A range of IP addresses, or one address."""

    def parse(self, raw: Raw, name: str) -> Network:
        """The network."""
        rule = "a network such as 10.0.0.0/8, or an address"
        text = scalar_of(raw, name, rule).text
        try:
            return ipaddress.ip_network(text)
        except ValueError as error:
            raise wrong(raw, name, f"{rule} (host bits zero)") from error

    def schema(self) -> dict[str, Any]:
        """A string."""
        return {"type": "string"}

    def show(self, value: Network) -> str:
        """As it would be written."""
        return str(value)


class PathRef(Kind[str]):
    """A folder, or a file, by its path.

    Args:
        empty: nothing at all may stand there too.
        what: what it is the path of, in errors.
    """

    def __init__(self, *, empty: bool = False, what: str = "a folder") -> None:
        self._empty = empty
        self._rule = f"the path of {what}"

    def parse(self, raw: Raw, name: str) -> str:
        """The path; one that stands in a file starts from that file's folder."""
        if self._empty and isinstance(raw, Scalar) and not raw.text:
            return ""
        scalar = scalar_of(raw, name, self._rule)
        if "\0" in scalar.text or len(scalar.text) > 4096:
            raise wrong(raw, name, self._rule)
        if scalar.folder is None or not self._is_path(scalar.text):
            return scalar.text
        return str(scalar.folder / scalar.text)

    def _is_path(self, text: str) -> bool:
        return True

    def schema(self) -> dict[str, Any]:
        """A string."""
        return {"type": "string"}


class PolicyRef(PathRef):
    """A shipped policy by its name, or a policy file by its path: whatever has a slash or ends in `.policy`."""

    def __init__(self, *, empty: bool = False) -> None:
        super().__init__(empty=empty, what="a .policy file")
        self._rule = f"the name of a shipped policy, or {self._rule}"

    def _is_path(self, text: str) -> bool:
        return is_policy_path(text)
