import sys
from pathlib import Path

import pytest

from smetric.app import Application
from smetric.config import load_settings
from smetric.errors import ConfigError
from smetric.fleet.instance import Instance
from smetric.sources.kv_events.publisher import Publisher, publishers


def listened_to(tmp_path: Path, text: str) -> list[Publisher]:
    path = tmp_path / "smetric.yaml"
    path.write_text(text)
    settings = load_settings(path, {})
    return publishers(settings, [Instance(one.id, one.url) for one in settings.instances])


def test_publishers_fill_in_host_and_port(tmp_path: Path) -> None:
    text = """
instances: [http://10.0.0.7:8000, "http://[fd00::7]:8001"]
kv_events: {enabled: true, replay: "tcp://{host}:1{port}", topic: "kv@{host}:{port}@"}
"""
    one, two = listened_to(tmp_path, text)
    assert (one.endpoint, one.replay, one.topic) == ("tcp://10.0.0.7:5557", "tcp://10.0.0.7:18000", "kv@10.0.0.7:8000@")
    assert (two.endpoint, two.replay, two.bind) == ("tcp://[fd00::7]:5557", "tcp://[fd00::7]:18001", False)


def test_publishers_prefer_addresses_of_the_instance(tmp_path: Path) -> None:
    text = """
instances:
  - {url: http://a:1, kv_events: "tcp://0.0.0.0:7001", kv_replay: "tcp://a:7101"}
  - {url: http://b:1, kv_events: "ipc:///run/b.ipc"}
kv_events: {enabled: true, bind: true}
"""
    one, two = listened_to(tmp_path, text)
    assert (one.endpoint, one.replay, one.bind) == ("tcp://0.0.0.0:7001", "tcp://a:7101", True)
    assert (two.endpoint, two.replay) == ("ipc:///run/b.ipc", "")


def test_publishers_count_ports_by_rank(tmp_path: Path) -> None:
    text = "instances: [http://a:1]\nkv_events: {enabled: true, ranks: 3, replay: 'tcp://{host}:5600'}\n"
    found = listened_to(tmp_path, text)
    assert [one.endpoint for one in found] == ["tcp://a:5557", "tcp://a:5558", "tcp://a:5559"]
    assert [one.replay for one in found] == ["tcp://a:5600", "tcp://a:5601", "tcp://a:5602"]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            "instances: [http://a:1, http://b:1]\nkv_events: {endpoint: 'tcp://all:5557'}",
            r"tcp://all:5557 would be the address of the events of a:1 and of the events of b:1; use \{host\} or",
        ),
        (
            "instances: [{url: http://a:1, kv_events: 'tcp://a:1'}, {url: http://b:1, kv_events: 'tcp://b:1'}]\n"
            "kv_events: {replay: 'tcp://all:5558'}",
            r"tcp://all:5558 would be the address of the replay socket of a:1 and of .* b:1; .* its own `kv_replay`",
        ),
        (
            "instances: [http://a:1]\nkv_events: {ranks: 2, replay: 'tcp://{host}:5558'}",
            r"tcp://a:5558 would be the address of the replay socket of a:1's rank 0 and of the events of a:1's rank 1",
        ),
        (
            "instances: [http://a:1]\nkv_events: {endpoint: 'tcp://{hots}:5557'}",
            r"tcp://\{hots\}:5557 has an unknown placeholder; use \{host\} or \{port\}",
        ),
        (
            "instances: [http://a:1]\nkv_events: {endpoint: 'tcp://{host}:65536'}",
            r"tcp://a:65536 has no port from 1",
        ),
        ("instances: [http://a:1]\nkv_events: {replay: 'tcp://{host}:0'}", r"tcp://a:0 has no port from 1 to 65535"),
        (
            "instances: [http://a:1]\nkv_events: {endpoint: 'tcp://{host}:65535', ranks: 2}",
            r"tcp://a:65535 has no port from 1 to 65535 for rank 1",
        ),
        (
            "instances: [http://a:1]\nkv_events: {endpoint: 'tcp://*:5557'}",
            r"is a listen address, which cannot be connected to; use \{host\}, or set kv_events\.bind",
        ),
        (
            "instances: [http://a:1]\nkv_events: {bind: true, replay: 'tcp://[::]:5558'}",
            r"tcp://\[::\]:5558 is a listen address",
        ),
        (
            "instances: [http://a:1]\nkv_events: {endpoint: 'ipc:///run/a', ranks: 2}",
            r"kv_events\.ranks is more than 1, but ipc:///run/a has no port",
        ),
        ("kv_events: {endpoint: 'udp://a:1'}", r"kv_events\.endpoint.*a ZeroMQ address such as tcp://\{host\}:5557"),
    ],
)
def test_publishers_refuse_unusable_addresses(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        listened_to(tmp_path, text)


def test_application_without_pyzmq_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "smetric.yaml"
    path.write_text("instances: [http://a:1]\nkv_events: {enabled: true}\ntokenizer: {source: engine}\n")
    settings = load_settings(path, {})
    monkeypatch.delitem(sys.modules, "smetric.sources.kv_events.source", raising=False)
    monkeypatch.delitem(sys.modules, "smetric.sources.kv_events.subscriber", raising=False)
    monkeypatch.setitem(sys.modules, "zmq", None)
    with pytest.raises(ConfigError, match=r"not installed \(zmq.*\): pip install 'smetric-router\[kv-events\]'"):
        Application(settings, {})
