from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from smetric.errors import ConfigError
from smetric.http import listener
from smetric.http.listener import handed_over, notify

PID = 4711


def environ(count: int | str = 1, names: str = "data", pid: int = PID) -> dict[str, str]:
    return {"LISTEN_PID": str(pid), "LISTEN_FDS": str(count), "LISTEN_FDNAMES": names}


def test_nothing_is_taken_that_is_meant_for_another_process() -> None:
    assert handed_over({}, PID) == {}
    assert handed_over(environ(pid=1), PID) == {}


def test_one_socket_is_the_data_port_whatever_it_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as given:
        monkeypatch.setattr(listener, "FIRST_FD", os.dup(given.fileno()))
        with handed_over(environ(names="smetric.socket"), PID)["data"] as taken:
            assert taken.getsockname() == given.getsockname()
            assert not taken.getblocking()
            assert not taken.get_inheritable()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (environ(3), 'LISTEN_FDS: expected 1 or 2 sockets, for data and admin, got "3"'),
        (environ("many"), 'got "many"'),
        (environ(2, "data:data"), "LISTEN_FDNAMES: of two sockets, name one data and one admin"),
    ],
)
def test_what_there_is_no_use_for_is_refused(given: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        handed_over(given, PID)


def test_only_a_tcp_socket_that_listens_will_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (tmp_path / "file").open("wb") as file:
        monkeypatch.setattr(listener, "FIRST_FD", os.dup(file.fileno()))
        with pytest.raises(ConfigError, match=r"descriptor \d+ \(data\) is no socket"):
            handed_over(environ(), PID)
    os.close(listener.FIRST_FD)
    with socket.socket() as mute:
        monkeypatch.setattr(listener, "FIRST_FD", os.dup(mute.fileno()))
        with pytest.raises(ConfigError, match="is not a TCP socket that listens"):
            handed_over(environ(), PID)


@pytest.mark.parametrize("is_abstract", [False, True])
def test_the_supervisor_is_told(tmp_path: Path, is_abstract: bool) -> None:
    name = f"@smetric-test-{os.getpid()}" if is_abstract else str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as told:
        told.bind("\0" + name[1:] if is_abstract else name)
        notify({"NOTIFY_SOCKET": name}, "READY=1")
        told.settimeout(5)
        assert told.recv(64) == b"READY=1"


def test_a_supervisor_that_cannot_be_told_stops_nothing(tmp_path: Path) -> None:
    notify({}, "READY=1")
    notify({"NOTIFY_SOCKET": str(tmp_path / "nobody")}, "READY=1")
