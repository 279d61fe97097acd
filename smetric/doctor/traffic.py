"""Check of what a running router has seen: predictions that turn out wrong, and clients that break their own caches."""

from __future__ import annotations

import msgspec

from smetric.doctor.address import local_url
from smetric.doctor.check import Skipped
from smetric.doctor.finding import Finding, info, shown, warning
from smetric.doctor.site import Site
from smetric.doctor.wire import NoAnswer
from smetric.unreadable import UNREADABLE

#: Seconds the router has to answer.
ANSWER_S = 3.0
#: Causes that are told, the costliest; and how often one must be seen to be more than worth knowing.
MOST_BREAKS = 8
OFTEN = 3

_APPEND = "let the client only append to a session's history, and leave what it has sent before as it was"
#: What to do, by the part that differs (`names.BROKEN_PARTS`), where it is no part of the history.
_REMEDIES = {
    "tools": "let the client send the same tools in the same order in every request of a session",
    "system": "move what changes (a time, a counter, an id) out of the system prompt, to the end of the last message",
    "template": "let the client send the same `chat_template_kwargs` and reasoning effort throughout a session",
    "cache_salt": "let the client send one `cache_salt` per tenant, not per request",
}


class _Latest(msgspec.Struct):
    answers: int
    predicted_tokens: int
    actual_tokens: int


class _Prediction(msgspec.Struct):
    instance: str
    source: str
    disagrees: bool
    latest: _Latest


class _Break(msgspec.Struct):
    summary: str
    client: str
    part: str
    count: int
    lost_tokens: int


class _Report(msgspec.Struct):
    predictions: list[_Prediction]
    breaks: list[_Break]


_REPORT = msgspec.json.Decoder(_Report)


async def traffic(site: Site) -> list[Finding]:
    """What the router at the configured admin port tells at /admin/cache."""
    admin = site.settings.admin
    try:
        answer = await site.wire.get(local_url(admin.host, admin.port) + "/admin/cache", within_s=ANSWER_S)
    except NoAnswer:
        raise Skipped("no router runs at admin.port") from None
    if answer.status in (401, 429):
        raise Skipped(
            "the router at admin.port wants another token: set admin.token, or SMETRIC_ADMIN__TOKEN, to its own"
        )
    try:
        report = _REPORT.decode(answer.body)
    except UNREADABLE:
        raise Skipped("what runs at admin.port tells nothing of caches") from None
    found = [
        warning(
            f"instance {shown(one.instance)}",
            f"over the last {one.latest.answers} answers {shown(one.source)} predicted {one.latest.predicted_tokens} "
            f"cached tokens, and the engine reported {one.latest.actual_tokens}",
            "sessions are sent where their cache is not, or leave where it is",
            "see the other findings; /admin/cache has the figures; if only `prefix_index` is wrong, set `kv_events`",
        )
        for one in report.predictions
        if one.disagrees
    ]
    return found + [
        (warning if one.count >= OFTEN else info)(
            f"client {shown(one.client)}",
            f"it breaks its own cached prefixes: {shown(one.summary)}",
            f"{one.lost_tokens} tokens had to be computed again, whatever the policy",
            _REMEDIES.get(one.part, _APPEND),
        )
        for one in report.breaks[:MOST_BREAKS]
    ]
