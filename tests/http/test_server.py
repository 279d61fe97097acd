from __future__ import annotations

import resource

import pytest

from smetric.cli.serve import Shutdown
from smetric.errors import ConfigError
from smetric.http.listener import RESERVED_FDS, address_of, listen, most_connections, raise_fd_limit

pytestmark = pytest.mark.slow


def test_a_port_in_use_is_told_with_the_way_out() -> None:
    with listen("127.0.0.1", 0) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"cannot listen on 127\.0\.0\.1:{port}: .*choose another"):
            listen("127.0.0.1", port)


@pytest.mark.parametrize("host", ["router..example", "r" * 64 + ".example", "two words"])
def test_an_address_that_is_none_is_told_with_the_way_out(host: str) -> None:
    with pytest.raises(ConfigError, match=rf"cannot listen on {host}:0: .*choose another address"):
        listen(host, 0)


def test_an_address_is_told_as_a_url() -> None:
    with listen("127.0.0.1", 0) as sock:
        assert address_of(sock) == f"http://127.0.0.1:{sock.getsockname()[1]}"


def test_a_second_signal_forces_the_end() -> None:
    shutdown = Shutdown()
    shutdown.signalled()
    assert shutdown.draining.is_set()
    assert not shutdown.forced.is_set()
    shutdown.signalled()
    assert shutdown.forced.is_set()


def test_a_limit_of_open_files_is_raised_as_far_as_it_goes() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        assert most_connections() == (256 - RESERVED_FDS) // 2
        raise_fd_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
        assert most_connections() > 96
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
