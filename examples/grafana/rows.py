"""Rows of the dashboard; metrics that no row contains get a panel in the last one."""

from __future__ import annotations

from panels import (
    Line,
    Panel,
    Row,
    counter,
    default,
    figure,
    gauge,
    heat_map,
    histogram,
    increase,
    quantile,
    rate,
    series,
    share,
    shares,
    summed,
)

from smetric import names
from smetric.names import Metric


def _hits(metric: Metric) -> str:
    """Return the share of the routed prompt tokens."""
    return f"sum({rate(metric)}) / sum({rate(names.PROMPT_TOKENS_TOTAL)})"


GLANCE = Row(
    "At a glance",
    (
        figure(
            "Healthy instances",
            names.UP.doc,
            "short",
            f"sum(max by (instance) ({series(names.UP)}))",
        ),
        figure("Requests", names.REQUESTS.doc, "reqps", f"sum({rate(names.REQUESTS)})"),
        figure("Rejected", names.DECISIONS.doc, "percentunit", share(names.DECISIONS, (), 'outcome="rejected"')),
        figure(
            "First byte, p99",
            names.FIRST_CHUNK_SECONDS.doc,
            "s",
            quantile(names.FIRST_CHUNK_SECONDS, 0.99),
        ),
        figure(
            "Cached, as reported",
            names.ACTUAL_HIT_TOKENS_TOTAL.doc,
            "percentunit",
            _hits(names.ACTUAL_HIT_TOKENS_TOTAL),
        ),
        figure("Imbalance", names.IMBALANCE.doc, "short", f"max({series(names.IMBALANCE)})"),
        figure("Tokens within SLO", names.SLO_TOKENS.doc, "percentunit", share(names.SLO_TOKENS, (), 'met="true"')),
        figure("Decision, p99", names.DECISION_SECONDS.doc, "s", quantile(names.DECISION_SECONDS, 0.99)),
    ),
    is_folded=False,
)

PAPER = Row(
    "Balance and stickiness",
    (
        heat_map(names.INFLIGHT, "Load: instances by time"),
        gauge(names.IMBALANCE, "Imbalance: largest over mean load", "short"),
        shares(
            "Stickiness",
            names.SESSION_TURNS.doc,
            Line(share(names.SESSION_TURNS, ("policy",), 'place="same"'), "{{policy}}"),
        ),
        Panel(
            "Prompt tokens: here, in a store, elsewhere, nowhere",
            names.HIT_PLACES.doc,
            "percentunit",
            (
                Line(
                    f"{summed(names.HIT_PLACES, ('found',))} / on () group_left () sum({rate(names.HIT_PLACES)})",
                    "{{found}}",
                ),
            ),
            is_stacked=True,
        ),
        counter(names.GUARD_OUTCOMES, "Guards that failed", ("policy", "rule", "guard"), 'held="false"'),
        counter(names.MIGRATIONS, "Migrations"),
        counter(names.MIGRATION_LEFT_TOKENS, "Tokens left behind by them"),
        shares(
            "Hits, predicted and reported",
            "Share of the prompt tokens routed. First turns of `smetric` look nothing up, so they predict nothing.",
            Line(_hits(names.HIT_TOKENS_TOTAL), "predicted"),
            Line(_hits(names.ACTUAL_HIT_TOKENS_TOTAL), "reported"),
        ),
        shares(
            "Tokens within SLO",
            names.SLO_TOKENS.doc,
            Line(share(names.SLO_TOKENS, ("policy", "arm"), 'met="true"'), "{{policy}} {{arm}}"),
        ),
        Panel(
            "Prefill time saved and lost, beside the other instance",
            names.SAVINGS_SECONDS.doc,
            "s",
            (
                Line(increase(names.SAVINGS_SECONDS, ("rule",), 'effect="saved"'), "saved {{rule}}"),
                Line("-" + increase(names.SAVINGS_SECONDS, ("rule",), 'effect="lost"'), "lost {{rule}}"),
            ),
        ),
        counter(names.SAVINGS_TOKENS, "Tokens saved and lost, beside the other instance", ("rule", "effect")),
        Panel(
            "Time to first token, predicted over actual",
            names.FORECAST_SECONDS.doc,
            "percentunit",
            (
                Line(
                    summed(names.FORECAST_SECONDS, ("policy",), 'kind="predicted"')
                    + " / "
                    + summed(names.FORECAST_SECONDS, ("policy",), 'kind="actual"'),
                    "{{policy}}",
                ),
            ),
        ),
        histogram(names.SCORE_MARGIN_RATIO, "How far ahead the chosen one is"),
    ),
    is_folded=False,
)

REQUESTS = Row(
    "Requests",
    (
        counter(names.REQUESTS, "Answers by status", ("code",)),
        histogram(names.FIRST_CHUNK_SECONDS, "Time to first byte"),
        histogram(names.REQUEST_SECONDS, "Duration"),
        histogram(names.TIME_PER_CHUNK, "Time per chunk"),
        histogram(names.OVERHEAD_SECONDS, "Arrival to first attempt"),
        counter(names.REFUSED, "Refused before a decision"),
        gauge(names.IN_PROGRESS, "In progress"),
        gauge(names.QUEUE_REQUESTS, "In the queue"),
        histogram(names.HOLD_SECONDS, "Time in the queue"),
        counter(names.ATTEMPTS, "Attempts by result", ("result",)),
        counter(names.RETRIES_REFUSED, "Retries refused"),
        counter(names.CLIENT_RETRIES, "Requests sent again by clients"),
    ),
)

DECISIONS = Row(
    "Decisions",
    (
        counter(names.DECISIONS, "Outcomes", ("policy", "outcome", "reason")),
        counter(names.SELECTED, "Decisions by instance", ("instance",)),
        histogram(names.DECISION_SECONDS, "Evaluation", ("policy",)),
        histogram(names.LOOKUP_SECONDS, "Waiting for look-ups"),
        gauge(names.POLICY_INFO, "Policies that act or shadow"),
        counter(names.POLICY_RELOADS, "Changes of policies"),
    ),
)

INSTANCES = Row(
    "Instances",
    (
        gauge(names.INFLIGHT, "Sent and not ended"),
        gauge(names.RUNNING, "Running, as scraped"),
        gauge(names.WAITING, "Waiting, as scraped"),
        gauge(names.KV_USAGE, "KV blocks in use"),
        gauge(names.UNPREFILLED, "Tokens not prefilled"),
        counter(names.PREFIX_TOKENS, "Prompt tokens by where engines found them", ("found",)),
        Panel(
            "Instances by state",
            names.STATE.doc,
            "short",
            (Line(f"sum by (state) ({series(names.STATE)})", "{{state}}"),),
            is_stacked=True,
        ),
        counter(names.EJECTIONS, "Left out"),
        counter(names.ATTEMPTS, "Failed attempts", ("instance", "result"), 'result!="ok"'),
    ),
)

KNOWLEDGE = Row(
    "What the router knows",
    (
        gauge(names.AGE, "Age of the last good scrape"),
        counter(names.SCRAPES, "Scrapes by result", ("result",)),
        histogram(names.SCRAPE_SECONDS, "Time of a scrape"),
        counter(names.LOOKUPS, "Look-ups"),
        counter(names.HIT_CHECKS, "Predicted hits, checked", ("source", "result")),
        gauge(names.HIT_DISAGREES, "Predictions that are wrong"),
        counter(names.CACHE_BREAKS, "What breaks prefixes"),
        gauge(names.INDEX_BLOCKS, "Blocks in the prefix index"),
        gauge(names.KV_KNOWN, "KV caches known by events"),
        gauge(names.KV_LAG, "How late KV events come"),
    ),
)

SHADOWS = Row(
    "Shadows and canaries",
    (
        shares(
            "Agreement of shadows",
            names.SHADOW_DECISIONS.doc,
            Line(
                summed(names.SHADOW_DECISIONS, ("policy",), 'agrees="true"')
                + " / "
                + summed(names.SHADOW_DECISIONS, ("policy",), 'agrees=~"true|false"'),
                "{{policy}}",
            ),
        ),
        histogram(names.SHADOW_REGRET_RATIO, "Their regret where they differ"),
        shares(
            "Conversations they would have moved",
            names.SHADOW_DIVERGED_SESSIONS.doc,
            Line(
                f"{summed(names.SHADOW_DIVERGED_SESSIONS, ('policy',))} / {summed(names.SHADOW_SESSIONS, ('policy',))}",
                "{{policy}}",
            ),
        ),
        counter(names.ARM_REQUESTS, "Requests by arm", ("route", "arm")),
        histogram(names.ARM_FIRST_CHUNK_SECONDS, "Time to first byte by arm", ("route", "arm")),
        shares(
            "Errors by arm",
            names.ARM_REQUESTS.doc,
            Line(share(names.ARM_REQUESTS, ("route", "arm"), 'code=~"5.."'), "{{route}} {{arm}}"),
        ),
    ),
)

ROUTER = Row(
    "The router itself",
    (
        histogram(names.LOOP_LAG, "Event loop, how late"),
        gauge(names.SATURATION, "Saturation"),
        gauge(names.OVERLOAD_LEVEL, "Overload level"),
        gauge(names.CONNECTIONS, "Connections"),
        gauge(names.BODY_BYTES, "Bodies kept"),
        counter(names.SPANS_DROPPED, "Spans lost"),
        counter(names.LOG_LINES_LOST, "Log lines lost"),
    ),
)

PLACED = (GLANCE, PAPER, REQUESTS, DECISIONS, INSTANCES, KNOWLEDGE, SHADOWS, ROUTER)


def rows() -> tuple[Row, ...]:
    """Return all rows; the last one contains all other metrics."""
    shown = " ".join(line.expr for row in PLACED for panel in row.panels for line in panel.lines)
    rest = [one for one in names.METRICS if not any(f"{one.name}{end}{{" in shown for end in ("", "_bucket"))]
    return (*PLACED, Row("Everything else", tuple(map(default, rest))))
