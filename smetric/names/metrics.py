"""Prometheus metrics: name, kind, labels, help and buckets; the module order is that of the reference page."""

from __future__ import annotations

from smetric.names.spans import (
    ANSWERS,
    BROKEN_PARTS,
    CHANGES,
    EJECTION_REASONS,
    PLACES,
    REFUSALS,
    RELOADS,
    STATES,
    Metric,
)

_MS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1)
_MICRO = (0.00001, 0.00002, 0.00005, 0.0001, 0.0002, 0.0005, *_MS)
_LAG = (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_DURATION = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
# fmt: off
_CHUNK = (
    0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5
)
# fmt: on
_SHARE = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9, 1.0)
_TTFT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 15.0, 30.0, 60.0)

DECISIONS = Metric("smetric_decisions_total", "counter", ("policy", "outcome", "reason"), "Decisions.")
SELECTED = Metric("smetric_instance_selected_total", "counter", ("instance", "policy"), "Decisions for an instance.")
DECISION_SECONDS = Metric(
    "smetric_decision_duration_seconds", "histogram", ("policy",), "Policy evaluation, look-ups not included.", _MICRO
)
LOOKUP_SECONDS = Metric(
    "smetric_lookup_duration_seconds", "histogram", (), "Time decisions waited for look-ups.", _MICRO
)
LOOKUPS = Metric(
    "smetric_lookups_total",
    "counter",
    ("source", "result"),
    "Look-ups a source had to answer, by how they ended; `not_asked` and `suspended` cost no request.",
)
LOOKUP_IS_SUSPENDED = Metric(
    "smetric_lookup_suspended", "gauge", ("source",), "1 while a source's service is left alone because it fails."
)
SOURCE_FAILURES = Metric(
    "smetric_source_failures_total",
    "counter",
    ("source",),
    "Times a source raised: a bug. What it knew was unknown.",
)
TOKENIZATIONS = Metric(
    "smetric_tokenizations_total",
    "counter",
    ("source", "result"),
    "Prompts whose token ids were wanted, by how that ended; all but `ok` are unknown.",
)
TOKENIZE_SECONDS = Metric(
    "smetric_tokenize_duration_seconds", "histogram", ("source",), "Time until a prompt's token ids were there.", _MICRO
)
TOKENIZE_CHECKS = Metric(
    "smetric_tokenize_checks_total",
    "counter",
    ("result",),
    "Answers whose prompt tokens the instance counted, against the number of ids: `equal` or `different`.",
)
SCORE_MARGIN_RATIO = Metric(
    "smetric_score_margin_ratio",
    "histogram",
    ("policy",),
    "How far the runner-up's score is from the chosen one's, as a share of the larger of the two.",
    _SHARE,
)
GUARD_OUTCOMES = Metric(
    "smetric_guard_outcomes_total",
    "counter",
    ("policy", "rule", "guard", "held"),
    "Guards evaluated, by whether they held.",
)
MIGRATIONS = Metric(
    "smetric_migrations_total",
    "counter",
    ("policy", "rule", "guard"),
    "Later turns that went elsewhere than to most of their prompt, or than the last turn, by what took them away.",
)
MIGRATION_LEFT_TOKENS = Metric(
    "smetric_migration_left_tokens_total", "counter", ("policy", "rule"), "Prompt tokens they left behind, where known."
)
SESSION_TURNS = Metric(
    "smetric_session_turns_total",
    "counter",
    ("policy", "place"),
    f"Later turns whose last turn is remembered, by whether they went to the same instance: {', '.join(PLACES)}.",
)
HIT_PLACES = Metric(
    "smetric_hit_tokens_total",
    "counter",
    ("policy", "found"),
    "Prompt tokens routed, where hits were looked up: in the chosen instance's cache (`local`), in the memory, disk or "
    "store that it fetches from (`store`), only in other instances' caches and so computed again (`elsewhere`), or in "
    "none (`missed`).",
)
SLO_TOKENS = Metric(
    "smetric_slo_tokens_total",
    "counter",
    ("policy", "arm", "met"),
    "Prompt and output tokens of streams that ended, by whether time to first token and per token were within `slo`.",
)
SAVINGS_TOKENS = Metric(
    "smetric_savings_tokens_total",
    "counter",
    ("policy", "rule", "effect"),
    "Prompt tokens found cached above (`saved`) or below (`lost`) what the other instance was believed to hold.",
)
SAVINGS_SECONDS = Metric(
    "smetric_savings_seconds_total",
    "counter",
    ("policy", "rule", "effect"),
    "Time to first token below (`saved`) or above (`lost`) what was expected of the other instance.",
)
FORECAST_SECONDS = Metric(
    "smetric_forecast_ttft_seconds_total",
    "counter",
    ("policy", "kind"),
    "Times to first token, as they were expected (`predicted`) and as they came (`actual`), of the same requests.",
)
FORECASTS = Metric("smetric_forecasts_total", "counter", ("policy",), "How many requests these are.")
TIME_PER_CHUNK = Metric(
    "smetric_time_per_output_chunk_seconds",
    "histogram",
    ("model",),
    "Time between two events of a stream, the mean of each stream.",
    _CHUNK,
)
REQUESTS = Metric("smetric_requests_total", "counter", ("route", "code"), "Requests answered.")
REQUEST_SECONDS = Metric(
    "smetric_request_duration_seconds", "histogram", ("route", "model"), "Arrival to end of the answer.", _DURATION
)
FIRST_CHUNK_SECONDS = Metric(
    "smetric_time_to_first_chunk_seconds",
    "histogram",
    ("model",),
    "Arrival to the first body byte upstream, of inference.",
    _TTFT,
)
OVERHEAD_SECONDS = Metric(
    "smetric_overhead_seconds", "histogram", (), "Arrival to the first attempt, look-ups included.", _MICRO
)
ATTEMPTS = Metric("smetric_upstream_attempts_total", "counter", ("instance", "result"), "Attempts on instances.")
RETRIES_REFUSED = Metric(
    "smetric_retries_refused_total",
    "counter",
    (),
    "Failed attempts not tried elsewhere: the retry budget was spent, the queue had no room, or a rule rejected it.",
)
IN_PROGRESS = Metric("smetric_requests_in_progress", "gauge", (), "Requests that arrived and have not ended.")
INFLIGHT = Metric("smetric_inflight_requests", "gauge", ("instance",), "Sequences sent to an instance and not ended.")
UNPREFILLED = Metric("smetric_unprefilled_tokens", "gauge", ("instance",), "Tokens sent there, first output not back.")
REFUSED = Metric(
    "smetric_requests_refused_total",
    "counter",
    ("reason",),
    f"Requests refused before they were sent, or sent again, by what there was too much of: {', '.join(REFUSALS)}.",
)
CLIENT_RETRIES = Metric(
    "smetric_client_retries_total",
    "counter",
    ("result",),
    "Requests that clients marked as retries (`x-stainless-retry-count`): `admitted` or `refused`.",
)
HOLD_SECONDS = Metric("smetric_hold_duration_seconds", "histogram", (), "Time requests spent in the queue.", _TTFT)
QUEUE_REQUESTS = Metric("smetric_queue_requests", "gauge", (), "Requests in the queue.")
QUEUE_BYTES = Metric("smetric_queue_bytes", "gauge", (), "Bytes of their bodies.")
BODY_BYTES = Metric("smetric_body_bytes", "gauge", (), "Bytes of request bodies kept until their answers begin.")
CONNECTIONS = Metric("smetric_connections", "gauge", (), "Connections of clients on the data port.")
LOOP_LAG = Metric(
    "smetric_event_loop_lag_seconds", "histogram", (), "How late the event loop was, ten times a second.", _LAG
)
OVERLOAD_LEVEL = Metric(
    "smetric_overload_level",
    "gauge",
    ("resource",),
    "What the router's own state forbids, by resource (`lag`, `memory`, `files`): 0 nothing, 1 more requests than are "
    "under way, 2 all new ones.",
)
SATURATION = Metric(
    "smetric_saturation_ratio",
    "gauge",
    ("of",),
    "For autoscalers: 1 when full, more when more is asked for. Of the `instances`, where known, and of the `router`.",
)
UP = Metric("smetric_instance_up", "gauge", ("instance",), "1 while it is healthy.")
DRAINING = Metric("smetric_instance_draining", "gauge", ("instance",), "1 while it is draining.")
STATE = Metric(
    "smetric_instance_state",
    "gauge",
    ("instance", "state"),
    f"1 for the state it is in: {', '.join(STATES)}.",
)
EJECTIONS = Metric(
    "smetric_instance_ejections_total",
    "counter",
    ("instance", "reason"),
    f"Times an instance was left out, by what settled it: {', '.join(EJECTION_REASONS)}.",
)
PANICS = Metric(
    "smetric_panics_total",
    "counter",
    (),
    "Times candidates were taken whatever their health, because fewer than `health.panic_below_percent` were well.",
)
RUNNING = Metric("smetric_instance_running", "gauge", ("instance",), "Requests running, as last scraped.")
WAITING = Metric("smetric_instance_waiting", "gauge", ("instance",), "Requests waiting, as last scraped.")
KV_USAGE = Metric("smetric_instance_kv_cache_usage_ratio", "gauge", ("instance",), "KV blocks in use, as last scraped.")
AGE = Metric("smetric_telemetry_age_seconds", "gauge", ("instance",), "Age of the last good scrape.")
SCRAPES = Metric("smetric_telemetry_scrapes_total", "counter", ("instance", "result"), "Scrapes of /metrics.")
SCRAPE_SECONDS = Metric("smetric_telemetry_scrape_duration_seconds", "histogram", (), "Time a scrape took.", _TTFT)
PROMPT_TOKENS_TOTAL = Metric(
    "smetric_prompt_tokens_total", "counter", ("model",), "Prompt tokens routed to be computed."
)
HIT_TOKENS_TOTAL = Metric("smetric_prefix_hit_tokens_total", "counter", ("model",), "Of those, believed cached.")
ACTUAL_HIT_TOKENS_TOTAL = Metric(
    "smetric_prefix_actual_hit_tokens_total", "counter", ("model",), "Of those, cached as the instances reported."
)
HIT_CHECKS = Metric(
    "smetric_prefix_checks_total",
    "counter",
    ("instance", "source", "result"),
    "Answers whose cached tokens were predicted by a source and reported: `equal` (within a block), `over`, `under`.",
)
HIT_WRONG_TOKENS = Metric(
    "smetric_prefix_wrong_tokens_total",
    "counter",
    ("instance", "source", "result"),
    "Tokens by which these predictions were too high (`over`), too low (`under`) or off within a block (`equal`).",
)
HIT_DISAGREES = Metric(
    "smetric_prefix_disagreement",
    "gauge",
    ("instance", "source"),
    "1 while a source's predictions for an instance are wrong by more than a fifth of the prompts, over a minute and "
    "50 answers at least.",
)
PREFIX_TOKENS = Metric(
    "smetric_instance_prefix_tokens_total",
    "counter",
    ("instance", "found"),
    "Prompt tokens an engine looked up in caches, as last scraped, by where it found them: `local`, `external`, or "
    "`missed`.",
)
CACHE_BREAKS = Metric(
    "smetric_cache_breaks_total",
    "counter",
    ("part", "change"),
    f"Follow-ups that missed the cache because their client did not continue the last prompt as it was, by the first "
    f"part that differs ({', '.join(BROKEN_PARTS)}) and what became of it ({', '.join(CHANGES)}).",
)
RECORD_LINES = Metric(
    "smetric_record_lines_total",
    "counter",
    ("record", "result"),
    "Lines of the record (`decisions`, `trace`): `written`, `dropped` as the queue was full, `failed` (see the log).",
)
SHADOW_DECISIONS = Metric(
    "smetric_shadow_decisions_total",
    "counter",
    ("policy", "agrees"),
    f"Decisions a policy in shadow was asked about, by whether it would have chosen the same: {', '.join(ANSWERS)}.",
)
SHADOW_REGRET_RATIO = Metric(
    "smetric_shadow_regret_ratio",
    "histogram",
    ("policy",),
    "Where it would have chosen otherwise: how much worse it finds what was chosen, of the larger of the two scores.",
    _SHARE,
)
SHADOW_SESSIONS = Metric(
    "smetric_shadow_sessions_total", "counter", ("policy",), "Conversations it was asked about, as far as remembered."
)
SHADOW_DIVERGED_SESSIONS = Metric(
    "smetric_shadow_diverged_sessions_total",
    "counter",
    ("policy",),
    "Of those, conversations it would have sent elsewhere at least once.",
)
SHADOW_SECONDS = Metric(
    "smetric_shadow_duration_seconds", "histogram", ("policy",), "Evaluating a policy in shadow.", _MICRO
)
ARM_REQUESTS = Metric(
    "smetric_arm_requests_total",
    "counter",
    ("route", "arm", "code"),
    "Requests answered on each arm, where a route has two.",
)
ARM_FIRST_CHUNK_SECONDS = Metric(
    "smetric_arm_time_to_first_chunk_seconds",
    "histogram",
    ("route", "arm"),
    "Arrival to the first body byte upstream on each arm, where a route has two.",
    _TTFT,
)
GUARDRAIL_RESTORES = Metric(
    "smetric_guardrail_restores_total",
    "counter",
    ("route", "reason"),
    "Times a policy was restored after a change, by what left its band: `errors` or `imbalance`.",
)
LISTENER_FAILURES = Metric(
    "smetric_listener_failures_total",
    "counter",
    ("listener",),
    "Exceptions raised by what records requests, by part; each costs one record, never the request.",
)
IMBALANCE = Metric(
    "smetric_load_imbalance_ratio",
    "gauge",
    ("model",),
    "Largest over mean load of its instances that are healthy and not draining.",
)
POLICY_INFO = Metric(
    "smetric_policy_info", "gauge", ("route", "name", "hash", "generation"), "1 for each policy that acts or shadows."
)
POLICY_ERRORS = Metric("smetric_policy_errors_total", "counter", ("policy",), "Evaluations that raised: a bug.")
POLICY_REFUSING = Metric(
    "smetric_policy_refusing_seconds",
    "gauge",
    ("route", "arm"),
    "Seconds for which a policy has refused every request; no series while it routes.",
)
POLICY_RELOADS = Metric(
    "smetric_policy_reloads_total", "counter", ("result",), f"Changes of policies: {', '.join(RELOADS)}."
)
INDEX_BLOCKS = Metric("smetric_prefix_index_blocks", "gauge", (), "Blocks in the prefix index.")
INDEX_BYTES = Metric("smetric_prefix_index_memory_bytes", "gauge", (), "Memory it takes, estimated.")
INDEX_EVICTIONS = Metric("smetric_prefix_index_evictions_total", "counter", (), "Blocks it evicted.")
KV_KNOWN = Metric(
    "smetric_kv_events_known", "gauge", ("instance",), "1 while all its KV caches' contents are known from its events."
)
KV_EVENTS = Metric(
    "smetric_kv_events_total",
    "counter",
    ("instance", "result"),
    "Messages of KV events: `ok`, `replayed`, `repeated`, `malformed`.",
)
KV_LAG = Metric(
    "smetric_kv_events_lag_seconds",
    "gauge",
    ("instance",),
    "From when the engine made its latest message, by its clock, until it was taken here; the longest of its ranks.",
)
KV_GAPS = Metric(
    "smetric_kv_events_gaps_total", "counter", ("instance",), "Gaps in the messages that no replay filled."
)
KV_MISSED = Metric("smetric_kv_events_missed_total", "counter", ("instance",), "Messages missed in these gaps.")
KV_ORPHANS = Metric(
    "smetric_kv_events_orphan_blocks_total", "counter", ("instance",), "Blocks stored whose parent was not known."
)
KV_INDEX_BLOCKS = Metric("smetric_kv_index_blocks", "gauge", (), "Blocks in the index of KV events.")
KV_INDEX_BYTES = Metric("smetric_kv_index_memory_bytes", "gauge", (), "Memory it takes, estimated.")
KV_INDEX_REFUSED = Metric("smetric_kv_index_refused_total", "counter", (), "Times a stored block found no room in it.")
PEER_UP = Metric("smetric_peer_up", "gauge", ("peer",), "1 while another router takes the placements it is sent.")
PLACEMENTS = Metric(
    "smetric_placements_total",
    "counter",
    ("result",),
    "Placements shared with other routers: `sent` and `dropped` once for each peer, `received`, and `refused`: of an "
    "instance or a process of it that is not known here.",
)
SPANS_DROPPED = Metric(
    "smetric_trace_spans_dropped_total", "counter", (), "Spans lost: queue full, export failed, or rejected."
)
LOG_LINES_LOST = Metric(
    "smetric_log_lines_lost_total",
    "counter",
    (),
    "Lines of the log that could not be written, for example on a full disk.",
)
BUILD_INFO = Metric("smetric_build_info", "gauge", ("version", "python"), "1 for the running version.")
