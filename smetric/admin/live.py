"""Live page: its files, the feed, one decision in full, and what another policy would have chosen.

All routes only read. A decision is shown from its record; nothing is looked up again.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

import orjson
from cachetools import TTLCache
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response, StreamingResponse
from starlette.routing import Route

from smetric import __version__, names
from smetric.admin.app import AdminRoute, decision_of
from smetric.admin.feed import PARAMETERS, DecisionFilter, Feed, TooManyViewers, Viewer, row, shadow_of
from smetric.admin.figures import Figures
from smetric.errors import ConfigError
from smetric.features import VOCABULARY
from smetric.files import shipped_policies
from smetric.fleet.fleet import Fleet
from smetric.fleet.record import DecisionRecord
from smetric.policy import NEVER, Decision, Policy, PolicyError
from smetric.policy.explain import columns_of, explain, guard_numbers, score_name, summary
from smetric.policy.types import figure
from smetric.records.recorder import recorded
from smetric.records.replay import Judge, NotRecorded, lag_of
from smetric.routing.policy_files import PolicyFile
from smetric.routing.routes import Routes
from smetric.telemetry.decisions import full
from smetric.telemetry.exchange import Telemetry

#: Most candidates in the table.
MOST_ROWS = 256


def account(record: DecisionRecord) -> dict[str, Any]:
    """Return a decision in full: its row, the rules with their numbers, the table, and the text of the policy."""
    decision, request = record.decision, record.request
    result = row(record) | full(record, top=0)
    result |= {
        "file": record.policy.path.rpartition("/")[2],
        "text": record.policy.source,
        "libraries": sorted(record.policy.libraries),
        "params": {name: figure(param.value) for name, param in record.policy.params.items()},
        "prompts": request.prompts,
        "shadows": [
            {**shadow_of(one), "sentence": summary(one.decision) if one.decision is not None else one.choice}
            for one in record.shadowed
        ],
    }
    if decision is not None:
        source = record.migration.source if record.migration is not None else ""
        result |= {"rules": rules(decision), "table": table(decision, source)}
    return result


def rules(decision: Decision) -> list[dict[str, Any]]:
    """Return the statements of the policy in order, with their lines and results."""
    source, visited = decision.policy.source, len(decision.stops)
    filters = iter(decision.filters)
    guards = iter(decision.guards)
    found = []
    for at, step in enumerate(decision.policy.plan.steps):
        first = source.count("\n", 0, step.span.start) + 1
        lines = [first, first + source.count("\n", step.span.start, step.span.end)]
        rule: dict[str, Any] = {"label": step.label, "kind": step.word, "lines": lines}
        if at >= visited:
            rule["result"] = "not reached"
        elif step.is_filter:
            narrowed = next(filters)
            left = f"left {len(narrowed.left)} of {len(decision.snapshot.ids)}"
            rule["result"] = (
                "ignored: it would leave no candidate"
                if narrowed.ignored
                else left
                if narrowed.applied
                else "does not apply"
            )
        else:
            fired = at == decision.step_index
            rule["result"] = "fired" if fired else "passed over"
            rule["guards"] = [
                {"guard": label, "held": held, "numbers": guard_numbers(decision, at, place)}
                for place, (label, held) in enumerate(next(guards).guards)
            ]
        rule["fired"] = at == decision.step_index
        found.append(rule)
    return found


def table(decision: Decision, source: str) -> dict[str, Any]:
    """Return what the policy saw of the candidates: columns with their meaning, and cells with value, age and source.

    The order is: the chosen one, *source*, the other candidates by rank, and the filtered ones.

    Args:
        decision: the decision.
        source: the instance that the request was moved from, or empty.
    """
    snapshot, score = decision.snapshot, decision.score
    ranked = decision.ranked
    others = sorted(set(range(len(snapshot.ids))) - set(ranked), key=lambda i: snapshot.ids[i])
    order = [*ranked, *others]
    if source in snapshot.ids and (at := snapshot.ids.index(source)) != decision.index:
        order.remove(at)
        order.insert(1, at)
    shown = order[:MOST_ROWS]
    read = columns_of(decision)
    names = [*read, *(name for name in snapshot.columns if name not in read and name != "id")]
    columns = []
    for name in names:
        feature = VOCABULARY.features[name]
        about = {"name": name, "unit": feature.unit, "doc": feature.doc, "staleness": feature.staleness}
        columns.append({**about, "lookup": feature.lookup, "unread": name not in read})
    ages = {name: snapshot.age(name) for name in names}
    known = {name: snapshot.is_known(name) for name in names}
    places = {index: place for place, index in enumerate(ranked)}
    rows = []
    for i in shown:
        cells = []
        for name in names:
            cell: dict[str, Any] = {"value": figure(snapshot.columns[name][i])}
            if not known[name][i]:
                cell["unknown"] = True
                cells.append(cell)
                continue
            if name in snapshot.stamps and ages[name][i] < NEVER:
                cell["age_s"] = round(ages[name][i], 3)
            if origin := snapshot.origin(name, i):
                cell["source"] = origin
            cells.append(cell)
        found: dict[str, Any] = {"id": snapshot.ids[i], "cells": cells, "rank": places.get(i)}
        if i == decision.index:
            found["chosen"] = True
        if snapshot.ids[i] == source:
            found["left"] = True
        if score is not None:
            found["score"] = figure(score[i])
        left_out = next((step.label for step in decision.filters if i not in step.left), None)
        if left_out is not None:
            found["left_out_by"] = left_out
        rows.append(found)
    pick = decision.pick
    return {
        "columns": columns,
        "rows": rows,
        "more": len(order) - len(shown),
        "score": score_name(decision) if score is not None and pick is not None else None,
        "direction": decision.direction,
    }


#: Seconds for which a loaded policy is reused, whatever its file says by then.
KEPT_S = 15.0
#: Prefix of the name of a route whose current policy is asked.
IN_FORCE = "in force: "


class OtherPolicies:
    """Policies for what-if: the shipped ones, loaded on demand off the event loop, and those in the settings.

    Args:
        in_force: returns the policies of the settings, by route.
        shipped: files of the shipped ones, by name.
    """

    def __init__(self, in_force: Callable[[], Mapping[str, Policy]], shipped: Mapping[str, Path]) -> None:
        self._in_force = in_force
        self._shipped = shipped
        self._loaded: TTLCache[str, Policy] = TTLCache(64, KEPT_S)

    def names(self) -> list[str]:
        """Return the names that may be asked for."""
        return [*self._shipped, *(f"{IN_FORCE}{route}" for route in self._in_force())]

    async def judge(self, record: DecisionRecord, name: str) -> dict[str, Any]:
        """Return as JSON what the policy *name*, one of `names`, would have chosen in place of *record*.

        Raises:
            ConfigError: its file cannot be read.
            PolicyError: it does not check.
        """
        policy = await self._policy(name)
        result: dict[str, Any] = {"origin": names.REPLAY, "policy": f"{policy.name}@{policy.digest}", "asked": name}
        seen = next(recorded([record], [policy]), None)
        if seen is None or not seen.line.ids:
            return result | {"answerable": False, "why": "not answerable: no policy ran"}
        decision = Judge(policy).decide(seen)
        if isinstance(decision, NotRecorded):
            return result | {"answerable": False, "why": str(decision)}
        live, score = record.decision, decision.score
        assert live is not None
        return result | {
            "answerable": True,
            "outcome": decision.outcome.value,
            "instance": decision.instance,
            "rule": decision.rule,
            "agrees": decision.choice == live.choice,
            "sentence": summary(decision),
            "rules": rules(decision),
            "scores": {decision.snapshot.ids[i]: score[i] for i in decision.foremost(256)} if score is not None else {},
            "explanation": explain(decision),
            "lag_s": lag_of(seen.line, decision),
        }

    async def _policy(self, name: str) -> Policy:
        if name.startswith(IN_FORCE):
            return self._in_force()[name.removeprefix(IN_FORCE)]
        path = self._shipped[name]
        policy = self._loaded.get(name)
        if policy is None:
            policy = await asyncio.to_thread(lambda: PolicyFile(path, VOCABULARY).current.policy)
            self._loaded[name] = policy
        return policy


class LiveStack:
    """Parts of the live page of one router.

    Args:
        telemetry: source of the decisions.
        fleet: the instances.
        routes: the policies of the settings.
        trace_url: URL of a trace, with `{trace_id}` in it, or empty.
    """

    def __init__(self, telemetry: Telemetry, fleet: Fleet, routes: Routes, trace_url: str) -> None:
        self._routes = routes
        self._trace_url = trace_url
        figures = Figures(lambda: fleet.instances, fleet.clock, lambda: time.time_ns() // 1_000_000)
        self.decisions = telemetry.decisions
        self.feed = Feed(telemetry.activity, figures, telemetry.decisions, self._about)
        self.others = OtherPolicies(
            lambda: {file.name: file.current.policy for file in routes.files()}, shipped_policies()
        )

    def _in_force(self) -> dict[str, Policy]:
        return {file.name: file.current.policy for file in self._routes.files()}

    def _about(self) -> dict[str, Any]:
        policies = []
        for _, arm in self._routes.acting():
            file, current = arm.file, arm.file.current
            about = {"route": file.name, "name": current.policy.name, "hash": current.policy.digest}
            policies.append({**about, "generation": current.number, "kept_because": file.problem})
        return {
            "version": __version__,
            "policies": policies,
            "what_if": self.others.names(),
            "trace_url": self._trace_url or None,
        }


#: Path of the page. It and its files need no token: they hold no data.
PAGE = "/admin/ui"
_FILES = Path(__file__).parent / "ui"
_KINDS = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_GUARDED = {
    "content-security-policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",
}
_FRESH = {"cache-control": "no-store", "x-content-type-options": "nosniff"}


def live_routes(live: LiveStack) -> list[Route]:
    """Return the page, `/admin/state`, `/admin/decisions/stream`, and below a decision `/account` and `/what-if`."""
    feed, others = live.feed, live.others
    pages = {path.name: (path.read_bytes(), _KINDS[path.suffix]) for path in _FILES.iterdir() if path.suffix in _KINDS}
    tags = {name: f'"{hashlib.sha256(body).hexdigest()[:16]}"' for name, (body, _) in pages.items()}

    async def page(request: Request) -> Response:
        name = request.path_params.get("name", "index.html")
        if name not in pages:
            raise HTTPException(404, "the page has no such file")
        body, kind = pages[name]
        headers = {**_GUARDED, "etag": tags[name]}
        if request.headers.get("if-none-match") == tags[name]:
            return Response(status_code=304, headers=headers)
        return Response(body, headers={**headers, "content-type": kind})

    async def to_page(request: Request) -> Response:
        target = "../ui" if request.url.path.endswith("/ui/") else "admin/ui"  # relative: a proxy may add a prefix
        return RedirectResponse(target, headers=_GUARDED)

    async def state(_: Request) -> Response:
        return _json({**feed.state(), "history": feed.figures.history()})

    async def stream(request: Request) -> Response:
        query = request.query_params
        if (history := query.get("history", "1")) not in ("0", "1"):
            raise HTTPException(400, f"history={history[:64]!r}: 0 or 1")
        if request.method == "HEAD":  # no body follows, and the next request waits for the end of this one
            return Response(headers=_FRESH, media_type="text/event-stream")
        try:
            viewer = feed.join(DecisionFilter.from_query(query), history=history == "1")
        except ValueError as error:
            raise HTTPException(400, str(error)) from None
        except TooManyViewers as error:
            raise HTTPException(503, f"{error}; close a page") from None
        headers = {**_FRESH, "x-accel-buffering": "no"}
        return StreamingResponse(_messages(feed, viewer), media_type="text/event-stream", headers=headers)

    async def one(request: Request) -> Response:
        return _json(account(decision_of(request, live.decisions)))

    async def what_if(request: Request) -> Response:
        record = decision_of(request, live.decisions)
        name = request.query_params.get("policy")
        if name not in (names := others.names()):
            status, what = (400, "policy: which one?") if name is None else (404, "no such policy;")
            raise HTTPException(status, f"{what} there are {', '.join(names)}")
        try:
            return _json(await others.judge(record, name))
        except (ConfigError, PolicyError) as error:
            raise HTTPException(409, f"policy {name} cannot be used: {error}") from None

    return [
        Route(PAGE, page),
        *(Route(path, to_page) for path in ("/", "/admin", f"{PAGE}/")),
        Route(f"{PAGE}/{{name}}", page),
        AdminRoute("/admin/state", state),
        AdminRoute("/admin/decisions/stream", stream, query=("history", *PARAMETERS)),
        AdminRoute("/admin/decisions/{id}/account", one),
        AdminRoute("/admin/decisions/{id}/what-if", what_if, query=("policy",)),
    ]


async def _messages(feed: Feed, viewer: Viewer) -> AsyncIterator[bytes]:
    try:
        async for message in viewer.messages():
            yield message
    finally:
        feed.leave(viewer)


def _json(data: object) -> Response:
    return Response(orjson.dumps(data, option=orjson.OPT_APPEND_NEWLINE), 200, _FRESH, "application/json")
