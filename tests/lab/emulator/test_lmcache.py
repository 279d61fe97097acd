"""Emulated LMCache services."""

from __future__ import annotations

import io
from typing import Any

import aiohttp
import orjson
import pytest

from smetric.lab.emulator.fleet import EmulatedFleet
from smetric.lab.emulator.instance import EmulatedSettings
from smetric.lab.engine import EngineConfig
from tests.sources.lmcache.captures import exchange


async def post(client: aiohttp.ClientSession, url: str, body: Any) -> tuple[int, Any]:
    data = io.BytesIO(orjson.dumps(body))
    async with client.post(url, data=data, headers={"content-type": "application/json"}) as response:
        return response.status, orjson.loads(await response.read())


def shape(value: Any) -> Any:
    """Return the keys of objects at every depth; of a list those of the first item, of a map of ids none."""
    if isinstance(value, dict):
        return {key: None if key == "layout_info" else shape(item) for key, item in value.items()}
    if isinstance(value, list):
        return [shape(item) for item in value[:1]]
    return type(value).__name__


async def test_lmcache_both_services_report_cached_chunks_per_instance() -> None:
    prompt = list(range(1000, 2024))
    settings = EmulatedSettings(model="m", engine=EngineConfig(block_size=32, blocks=1000, max_model_len=4096))
    async with EmulatedFleet(3, settings, lmcache=True) as fleet, aiohttp.ClientSession() as client:
        a, b, c = (url.removeprefix("http://") for url in fleet.urls)
        for url, length in ((fleet.urls[0], 600), (fleet.urls[1], 1024)):
            body = {"prompt": prompt[:length], "max_tokens": 1}
            assert (await post(client, url + "/v1/completions", body))[0] == 200
        asked = {"token_ids": prompt, "model_name": "m", "world_size": 1, "cache_salt": ""}
        status, directory = await post(client, fleet.lmcache_url + "/directory/lookup", asked)
        held = [{place["instance_id"] for place in one["placements"]} for one in directory["results"]]
        assert (status, directory["chunks"], held) == (200, 4, [{a, b}, {a, b}, {b}, {b}])
        assert c not in set().union(*held)
        # The controller names the instance that registered first.
        status, layout = await post(client, fleet.lmcache_url + "/lookup", {"tokens": prompt})
        assert layout["layout_info"] == {a: ["LocalCPUBackend", 512], b: ["LocalCPUBackend", 1024]}
        for other in ({"model_name": "other"}, {"cache_salt": "tenant1"}, {"world_size": 2}):
            _, directory = await post(client, fleet.lmcache_url + "/directory/lookup", {**asked, **other})
            assert not any(one["placements"] for one in directory["results"])
        assert len(directory["results"]) == 8
        fleet.reset()
        assert (await post(client, fleet.lmcache_url + "/lookup", {"tokens": prompt}))[1]["layout_info"] == {}


async def test_lmcache_answers_have_recorded_shape() -> None:
    async with EmulatedFleet(1, EmulatedSettings(model="m"), lmcache=True) as fleet, aiohttp.ClientSession() as client:
        prompt = list(range(1000, 1512))
        assert (await post(client, fleet.urls[0] + "/v1/completions", {"prompt": prompt, "max_tokens": 1}))[0] == 200
        _, directory = await post(
            client, fleet.lmcache_url + "/directory/lookup", {"token_ids": prompt, "model_name": "m"}
        )
        real = orjson.loads(exchange("mpreal_00_directory_lookup_real_store")[2])
        assert shape(directory) == shape(real)
        _, layout = await post(client, fleet.lmcache_url + "/lookup", {"tokens": prompt})
        assert shape(layout) == shape(orjson.loads(exchange("controller_10_lookup_hit_one")[2]))


@pytest.mark.parametrize(
    ("path", "body", "capture"),
    [
        ("/directory/lookup", {"token_ids": [], "model_name": "m"}, "coordinator_30_empty_tokens"),
        ("/directory/lookup", {"token_ids": [1]}, "coordinator_31_no_model"),
        ("/directory/lookup", {"token_ids": [1] * 1_000_001, "model_name": "m"}, "coordinator_34_over_cap"),
        ("/lookup", {"prompt": "hello"}, "controller_31_missing_field"),
        ("/lookup", {"tokens": ["a", "b"]}, "controller_32_tokens_strings"),
        ("/no_such", {}, "controller_38_unknown_endpoint"),
    ],
)
async def test_lmcache_rejects_with_recorded_status(path: str, body: Any, capture: str) -> None:
    async with EmulatedFleet(1, lmcache=True) as fleet, aiohttp.ClientSession() as client:
        status, answer = await post(client, fleet.lmcache_url + path, body)
        assert (status, list(answer)) == (exchange(capture)[1], ["detail"])


async def test_lmcache_rejects_oversized_and_unreadable_requests() -> None:
    async with EmulatedFleet(1, lmcache=True) as fleet, aiohttp.ClientSession() as client:
        url = fleet.lmcache_url + "/directory/lookup"
        status, answer = await post(client, url, {"token_ids": [1] * 300, "model_name": "m", "world_size": 10**12})
        assert (status, answer["detail"]) == (400, "too many ranks in a single request (limit=1024, got=1000000000000)")
        async with client.post(url, data=b'"\xff"', headers={"content-type": "application/json"}) as response:
            assert response.status == 400


async def test_lmcache_lists_instances_and_is_healthy() -> None:
    async with EmulatedFleet(2, lmcache=True) as fleet, aiohttp.ClientSession() as client:
        async with client.get(fleet.lmcache_url + "/instances") as response:
            listed = orjson.loads(await response.read())["instances"]
        assert [f"http://{one['instance_id']}" for one in listed] == fleet.urls
        # The real answer also has the fields of ports that the emulator lacks.
        real = orjson.loads(exchange("coordinator_05_instances")[2])["instances"]
        assert set(listed[0]) <= set(real[0])
        async with client.get(fleet.lmcache_url + "/controller/workers") as response:
            workers = orjson.loads(await response.read())
        assert [worker["instance_id"] for worker in workers["workers"]] == [one["instance_id"] for one in listed]
        assert set(workers["workers"][0]) == set(
            orjson.loads(exchange("controller_47_controller_workers")[2])["workers"][0]
        )
        async with client.get(fleet.lmcache_url + "/healthz") as response:
            assert await response.json() == {"status": "healthy"}
