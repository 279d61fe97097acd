"""Admin port: routes and their parameters."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

import orjson
import pytest

from smetric.sources.shared import MAX_BATCH_BYTES
from tests.fakes import FakeEngine, RawClient, Response, chunk, fetch, request
from tests.faults.harness import Running, running

pytestmark = pytest.mark.slow

#: Each path, and what may be asked for there; ID and NAME are put in.
PATHS = {
    "GET /admin/decisions": ["limit"],
    "GET /admin/decisions/ID": [],
    "GET /admin/decisions/ID/account": [],
    "GET /admin/decisions/ID/record": [],
    "GET /admin/decisions/ID/what-if": ["policy"],
    "GET /admin/decisions/stream": ["history", "outcome", "rule", "instance", "migrated", "margin", "text"],
    "GET /admin/state": [],
    "GET /admin/instances": [],
    "GET /admin/policy": [],
    "GET /admin/policies": [],
    "GET /admin/policies/default": [],
    "POST /admin/policies/default/rollback": [],
    "POST /admin/policies/default/try": [],
    "POST /admin/instances/e0/drain": [],
    "POST /admin/instances/e0/undrain": [],
    "GET /admin/savings": [],
    "GET /admin/cache": [],
}


async def admin(router: Running, path: str) -> Response:
    method, target = path.split(" ")
    return await fetch(router.admin_url, method, target)


def error_of(answer: Response) -> str:
    return str(orjson.loads(answer.body)["error"])


async def test_parameters_are_known_and_given_once() -> None:
    async with running(FakeEngine(), check_after=False) as router:
        id = (await router.chat()).value("x-smetric-decision-id")
        for path, known in PATHS.items():
            answer = await admin(router, path.replace("ID", id) + "?nonsense=1")
            names = f"there are {', '.join(known)}" if known else "there are none here"
            assert (answer.status, error_of(answer)) == (400, f"nonsense: no such parameter; {names}"), path
        assert not router.application.fleet.instances[0].draining
        answer = await router.admin("/admin/decisions?limit=1&limit=2")
        assert (answer.status, error_of(answer)) == (400, "limit: given twice; give it once")
        for path in ("/healthz", "/readyz", "/metrics"):
            assert (await router.admin(f"{path}?verbose")).status == 200


async def test_known_paths_are_answered() -> None:
    async with running(FakeEngine(), warm=False, check_after=False) as router:
        ids = [(await router.chat()).value("x-smetric-decision-id") for _ in range(3)]

        async def decisions(query: str) -> list[Any]:
            found = orjson.loads((await router.admin(f"/admin/decisions{query}")).body)
            return [row["id"] for row in found["decisions"]]

        assert await decisions("") == await decisions("?limit=100000") == ids[::-1]
        assert await decisions("?limit=1") == ids[-1:]
        assert await decisions("?limit=0") == []
        for limit in ("-1", "1.5", "ten", "", "²", "9" * 5000):  # not whole
            answer = await router.admin(f"/admin/decisions?limit={quote(limit)}")
            assert (answer.status, "a whole number is needed" in error_of(answer)) == (400, True)
        answer = await router.admin(f"/admin/decisions/{ids[0]}/what-if")
        assert answer.status == 400
        assert error_of(answer).startswith("policy: which one? there are ")
        answer = await router.admin("/admin/decisions/stream?history=yes")
        assert (answer.status, error_of(answer)) == (400, "history='yes': 0 or 1")


async def test_unknown_path_lists_the_known_ones() -> None:
    async with running(FakeEngine(), check_after=False) as router:
        for path, target in {"/": "admin/ui", "/admin": "admin/ui", "/admin/ui/": "../ui"}.items():
            answer = await router.admin(path)
            assert (answer.status, answer.value("location")) == (307, target)
        unknown = await router.admin("/admin/decision")
        assert unknown.status == 404
        assert "/admin/ui" in error_of(unknown)
        assert "docs/reference/http-api.md" in error_of(unknown)
        wrong = await admin(router, "DELETE /admin/instances")
        assert (wrong.status, "GET" in wrong.value("allow")) == (405, True)
        assert error_of(wrong) in {
            f"this path does not take DELETE; it takes {allowed}" for allowed in ("GET, HEAD", "HEAD, GET")
        }


READING = [path.removeprefix("POST ") for path in PATHS if path.endswith(("/rollback", "/try"))]


@pytest.mark.parametrize("path", READING)
async def test_chunked_body_is_bounded(path: str) -> None:
    async with running(FakeEngine()) as router, await RawClient.connect(router.admin_url) as client:
        await client.send(request("POST", path, headers=[("Transfer-Encoding", "chunked")]))
        await client.send(chunk(b" " * MAX_BATCH_BYTES) + chunk(b" "))
        answer = await client.response()
        assert (answer.status, error_of(answer)) == (413, f"a body has at most {MAX_BATCH_BYTES} bytes here")


async def test_disconnect_during_a_request_is_no_router_error() -> None:
    async with running(FakeEngine()) as router:
        for path in READING:
            async with await RawClient.connect(router.admin_url) as client:
                await client.send(request("POST", path, headers=[("Content-Length", "2")]) + b"{")
    assert "smetric.request.failed" not in router.logged()
