"""Admin routes of policies: list them, try a candidate on the last decisions, and roll back.

A trial swaps nothing. For decisions on disk there is `smetric replay`.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, TypeVar

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from smetric import names
from smetric import policy as language
from smetric.admin.app import AdminRoute, as_json, body_of
from smetric.errors import UNREADABLE
from smetric.features import VOCABULARY
from smetric.fleet.record import DecisionRecord
from smetric.policy import Policy, PolicyError, PolicyText, Reader
from smetric.policy.parameter import CONFIGURATION
from smetric.policy.parser import MAX_BYTES
from smetric.records import report
from smetric.records.recorder import recorded
from smetric.records.replay import RECORDED, Comparison, Judges, replay
from smetric.routing.policy_files import Generation, NoGeneration, Origin, PolicyFile
from smetric.routing.routes import Route, Routes
from smetric.telemetry.decisions import KEPT, DecisionLog

#: Seconds of a trial, and examples that it explains.
MOST_S = 5.0
EXAMPLES = 5

Settings = Mapping[str, float | str | bool]


def candidate_of(file: PolicyFile, text: str, settings: Settings | None, libraries: Mapping[str, str]) -> Policy:
    """Return the policy of *text* as a candidate for *file*.

    Args:
        file: the policy that it is tried against.
        text: text of the candidate.
        settings: parameter values; None for the configured ones.
        libraries: texts by name; others are read beside the file.

    Raises:
        PolicyError: it does not check.
    """
    beside: Reader = file.beside

    def library(name: str) -> PolicyText | None:
        return PolicyText(libraries[name], f"{name}.policy") if name in libraries else beside(name)

    given, by = (file.settings, CONFIGURATION) if settings is None else (settings, "this trial")
    return language.load(text, VOCABULARY, path="candidate.policy", settings=given, libraries=library, set_by=by)


def trial(
    candidate: Policy,
    records: Sequence[DecisionRecord],
    is_given_up: Callable[[], bool] = lambda: False,
    *,
    clock: Callable[[], float] = time.monotonic,
) -> dict[str, Any]:
    """Return how *candidate* compares with the decisions of *records*, oldest first, as JSON values.

    It stops after `MOST_S` seconds, and says so; also as soon as *is_given_up* returns true, asked before each
    decision.
    """
    end = clock() + MOST_S
    found = Comparison(RECORDED, candidate.name)
    in_time = itertools.takewhile(lambda _: clock() < end and not is_given_up(), recorded(records, [candidate]))
    replay(in_time, Judges(candidate), None, found)
    examples = report.examples(found, EXAMPLES)
    return {
        "candidate": f"{candidate.name}@{candidate.digest}",
        "warnings": [one.brief(candidate.source) for one in candidate.warnings],
        "cut_short": found.read < len(records),
        **report.as_json(found, examples),
        "text": report.as_text(found, examples),
    }


T = TypeVar("T")

#: Most libraries sent with a candidate.
_MOST_LIBRARIES = 32


class _Candidate(msgspec.Struct, forbid_unknown_fields=True):
    """Body of `try`. A body that is not JSON is the text of a policy.

    Args:
        policy: the text.
        params: parameter values; the configured ones by default.
        libraries: texts of libraries by name; others are read beside the current policy.
        last: decisions that it is tried on.
    """

    policy: str
    params: dict[str, float | str | bool] | None = None
    libraries: dict[str, str] = {}
    last: int = KEPT


class _Rollback(msgspec.Struct, forbid_unknown_fields=True):
    """Body of `rollback`: the generation to restore; the previous one by default."""

    generation: int | None = None


def policy_routes(routes: Routes, decisions: DecisionLog, ending: threading.Event) -> list[AdminRoute]:
    """Return `/admin/policy` (the last route's), `/admin/policies`, and below one of these `…/rollback` and `…/try`.

    Args:
        routes: all policies.
        decisions: the last decisions, on which candidates are tried.
        ending: set when the router ends, so that a thread with a trial does not delay it.
    """
    trying = asyncio.Lock()

    def find(request: Request) -> tuple[Route, PolicyFile]:
        try:
            return routes.find(request.path_params["name"])
        except KeyError as error:
            raise HTTPException(404, str(error.args[0])) from error

    async def default(_: Request) -> Response:
        about = _about(routes.last, routes.last.control.file)
        shown = ("hash", "generation", "path", "params", "reads", "kept_because")
        return as_json({"name": about["policy"]} | {key: about[key] for key in shown})

    async def every(_: Request) -> Response:
        return as_json({"policies": [_about(route, file) for route in routes.all for file in route.files()]})

    async def one(request: Request) -> Response:
        route, file = find(request)
        return as_json(_about(route, file) | {"generations": [_text(each) for each in file.generations]})

    async def rollback(request: Request) -> Response:
        route, file = find(request)
        wanted = _read(await body_of(request) or b"{}", _Rollback)
        try:
            file.restore(Origin.ROLLBACK, wanted.generation)
        except NoGeneration as error:
            raise HTTPException(409, str(error)) from error
        return as_json(_about(route, file))

    async def attempt(request: Request) -> Response:
        route, file = find(request)
        candidate = _candidate(await body_of(request))
        arms = {arm.file: arm.name for of, arm in routes.acting() if of is route}
        if file not in arms:
            raise HTTPException(409, f"{file.name} is in shadow and decides nothing; try it against {route.name}")
        if trying.locked():
            raise HTTPException(429, "another policy is being tried; ask again in a few seconds")
        records = [
            record
            for record in decisions.recent(KEPT)
            if record.route == route.name and record.decision is not None and record.arm == arms[file]
        ][: candidate.last][::-1]
        async with trying:
            # In a thread: a thousand decisions take a tenth of a second and more.
            try:
                loaded = await asyncio.to_thread(
                    candidate_of, file, candidate.policy, candidate.params, candidate.libraries
                )
            except PolicyError as error:
                found = [{"code": each.code, "message": each.brief(error.text)} for each in error.diagnostics]
                return as_json({"error": str(error), "diagnostics": found}, 422)
            try:
                answer = await asyncio.to_thread(trial, loaded, records, ending.is_set)
            except asyncio.CancelledError:
                ending.set()  # forced: the process would wait for the thread
                raise
        if ending.is_set():
            raise HTTPException(503, "the router is ending")
        current = file.current.policy
        return as_json({"route": route.name, "acts": f"{current.name}@{current.digest}"} | answer)

    return [
        AdminRoute("/admin/policy", default),
        AdminRoute("/admin/policies", every),
        AdminRoute("/admin/policies/{name}", one),
        AdminRoute("/admin/policies/{name}/rollback", rollback, methods=["POST"]),
        AdminRoute("/admin/policies/{name}/try", attempt, methods=["POST"]),
    ]


def _about(route: Route, file: PolicyFile) -> dict[str, Any]:
    """Return the state of a policy."""
    current, previous, match = file.current, file.previous(), route.match
    arms = [arm.name for arm in (route.control, route.canary) if arm is not None and arm.file is file]
    return {
        "name": file.name,
        "route": route.name,
        "acts": bool(arms),
        "arm": (arms[0] or None) if arms else names.SHADOW,
        "share": {names.CONTROL: 1 - route.share, names.CANARY: route.share}.get(arms[0], 1.0) if arms else None,
        "match": {
            "model": sorted(match.models),
            "tenant": sorted(match.tenants),
            "path": sorted(match.paths),
        },
        "policy": current.policy.name,
        "hash": current.policy.digest,
        "path": str(file.path),
        "params": {
            name: {"value": param.value, "unit": param.unit, "configured": param.configured}
            for name, param in current.policy.params.items()
        },
        "reads": sorted(current.policy.reads),
        "kept_because": file.problem,
        "generation": current.number,
        "previous": previous.number if previous is not None else None,
        "generations": [_generation(each) for each in file.generations],
    }


def _generation(generation: Generation) -> dict[str, Any]:
    return {
        "number": generation.number,
        "of": generation.of,
        "policy": generation.policy.name,
        "hash": generation.policy.digest,
        "origin": generation.origin.value,
        "since": datetime.fromtimestamp(generation.since_ns / 1e9, UTC).isoformat(timespec="milliseconds"),
    }


def _text(generation: Generation) -> dict[str, Any]:
    policy = generation.policy
    return _generation(generation) | {
        "text": policy.source,
        "libraries": {name: library.text for name, library in policy.libraries.items()},
    }


def _candidate(body: bytes) -> _Candidate:
    """Return the candidate in a body."""
    if body.lstrip().startswith(b"{"):
        candidate = _read(body, _Candidate)
    else:
        try:
            candidate = _Candidate(body.decode())
        except UnicodeDecodeError as error:
            raise HTTPException(400, "the body is neither JSON nor the text of a policy in UTF-8") from error
    texts = [candidate.policy, *candidate.libraries.values()]
    if len(texts) > _MOST_LIBRARIES + 1 or any(len(text.encode()) > MAX_BYTES for text in texts):
        raise HTTPException(413, f"at most {_MOST_LIBRARIES} libraries, and {MAX_BYTES} bytes for each text")
    if not 1 <= candidate.last <= KEPT:
        raise HTTPException(400, f"last={candidate.last}: a whole number from 1 to {KEPT} is needed")
    return candidate


def _read(body: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(body, type=kind)
    except UNREADABLE as error:
        raise HTTPException(400, f"the body is not as expected: {error}") from error
