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

DECISIONS = Metric("smetric_decisions_total{policy,outcome,reason}", "Decisions.")
SELECTED = Metric("smetric_instance_selected_total{instance,policy}", "Decisions for an instance.")
DECISION_SECONDS = Metric(
    "smetric_decision_duration_seconds{policy}", "Policy evaluation, look-ups not included.", _MICRO
)
LOOKUP_SECONDS = Metric("smetric_lookup_duration_seconds", "Time decisions waited for look-ups.", _MICRO)
LOOKUPS = Metric(
    "smetric_lookups_total{source,result}",
    "Look-ups a source had to answer, by how they ended; `not_asked` and `suspended` cost no request.",
)
LOOKUP_IS_SUSPENDED = Metric(
    "smetric_lookup_suspended{source}", "1 while a source's service is left alone because it fails."
)
SOURCE_FAILURES = Metric(
    "smetric_source_failures_total{source}", "Times a source raised: a bug. What it knew was unknown."
)
TOKENIZATIONS = Metric(
    "smetric_tokenizations_total{source,result}",
    "Prompts whose token ids were wanted, by how that ended; all but `ok` were unknown to the decision.",
)
TOKENIZE_SECONDS = Metric(
    "smetric_tokenize_duration_seconds{source}", "Time until a prompt's token ids were there.", _MICRO
)
TOKENIZE_CHECKS = Metric(
    "smetric_tokenize_checks_total{result}",
    "Answers whose prompt tokens the instance counted, against the number of ids: `equal` or `different`.",
)
SCORE_MARGIN_RATIO = Metric(
    "smetric_score_margin_ratio{policy}",
    "How far the runner-up's score is from the chosen one's, as a share of the larger of the two.",
    _SHARE,
)
GUARD_OUTCOMES = Metric(
    "smetric_guard_outcomes_total{policy,rule,guard,held}", "Guards evaluated, by whether they held."
)
MIGRATIONS = Metric(
    "smetric_migrations_total{policy,rule,guard}",
    "Later turns that went elsewhere than to most of their prompt, or than the last turn, by what took them away.",
)
MIGRATION_LEFT_TOKENS = Metric(
    "smetric_migration_left_tokens_total{policy,rule}", "Prompt tokens they left behind, where known."
)
SESSION_TURNS = Metric(
    "smetric_session_turns_total{policy,place}",
    f"Later turns whose last turn is remembered, by whether they went to the same instance: {', '.join(PLACES)}.",
)
HIT_PLACES = Metric(
    "smetric_hit_tokens_total{policy,found}",
    "Prompt tokens routed, where hits were looked up: in the chosen instance's cache (`local`), in the memory, disk or "
    "store that it fetches from (`store`), only in other instances' caches and so computed again (`elsewhere`), or in "
    "none (`missed`).",
)
SLO_TOKENS = Metric(
    "smetric_slo_tokens_total{policy,arm,met}",
    "Prompt and output tokens of streams that ended, by whether time to first token and per token were within `slo`.",
)
SAVINGS_TOKENS = Metric(
    "smetric_savings_tokens_total{policy,rule,effect}",
    "Prompt tokens found cached above (`saved`) or below (`lost`) what the other instance was believed to hold.",
)
SAVINGS_SECONDS = Metric(
    "smetric_savings_seconds_total{policy,rule,effect}",
    "Time to first token below (`saved`) or above (`lost`) what was expected of the other instance.",
)
FORECAST_SECONDS = Metric(
    "smetric_forecast_ttft_seconds_total{policy,kind}",
    "Times to first token, as they were expected (`predicted`) and as they came (`actual`), of the same requests.",
)
FORECASTS = Metric("smetric_forecasts_total{policy}", "How many requests these are.")
TIME_PER_CHUNK = Metric(
    "smetric_time_per_output_chunk_seconds{model}",
    "Time between two events of a stream from its first output on, the mean of each stream.",
    _CHUNK,
)
REQUESTS = Metric("smetric_requests_total{route,code}", "Requests answered.")
REQUEST_SECONDS = Metric("smetric_request_duration_seconds{route,model}", "Arrival to end of the answer.", _DURATION)
FIRST_CHUNK_SECONDS = Metric(
    "smetric_time_to_first_chunk_seconds{model}", "Arrival to the first output upstream, of inference.", _TTFT
)
OVERHEAD_SECONDS = Metric("smetric_overhead_seconds", "Arrival to the first attempt, look-ups included.", _MICRO)
ATTEMPTS = Metric("smetric_upstream_attempts_total{instance,result}", "Attempts on instances.")
RETRIES_REFUSED = Metric(
    "smetric_retries_refused_total",
    "Failed attempts not tried elsewhere: the retry budget was spent, the queue had no room, or a rule rejected it.",
)
IN_PROGRESS = Metric("smetric_requests_in_progress", "Requests that arrived and have not ended.")
INFLIGHT = Metric("smetric_inflight_requests{instance}", "Sequences sent to an instance and not ended.")
UNPREFILLED = Metric("smetric_unprefilled_tokens{instance}", "Tokens sent there, first output not back.")
REFUSED = Metric(
    "smetric_requests_refused_total{reason}",
    f"Requests refused before they were sent, or sent again, by what there was too much of: {', '.join(REFUSALS)}.",
)
CLIENT_RETRIES = Metric(
    "smetric_client_retries_total{result}",
    "Requests that clients marked as retries (`x-stainless-retry-count`): `admitted` or `refused`.",
)
HOLD_SECONDS = Metric("smetric_hold_duration_seconds", "Time requests spent in the queue.", _TTFT)
QUEUE_REQUESTS = Metric("smetric_queue_requests", "Requests in the queue.")
QUEUE_BYTES = Metric("smetric_queue_bytes", "Bytes of their bodies.")
BODY_BYTES = Metric("smetric_body_bytes", "Bytes of request bodies kept until their answers begin.")
CONNECTIONS = Metric("smetric_connections", "Connections of clients on the data port.")
LOOP_LAG = Metric("smetric_event_loop_lag_seconds", "How late the event loop was, ten times a second.", _LAG)
OVERLOAD_LEVEL = Metric(
    "smetric_overload_level{resource}",
    "What the router's own state forbids, by resource (`lag`, `memory`, `files`): 0 nothing, 1 more requests than are "
    "under way, 2 all new ones.",
)
SATURATION = Metric(
    "smetric_saturation_ratio{of}",
    "For autoscalers: 1 when full, more when more is asked for. Of the `instances`, where known, and of the `router`.",
)
UP = Metric("smetric_instance_up{instance}", "1 while it is healthy.")
DRAINING = Metric("smetric_instance_draining{instance}", "1 while it is draining.")
STATE = Metric("smetric_instance_state{instance,state}", f"1 for the state it is in: {', '.join(STATES)}.")
EJECTIONS = Metric(
    "smetric_instance_ejections_total{instance,reason}",
    f"Times an instance was left out, by what settled it: {', '.join(EJECTION_REASONS)}.",
)
PANICS = Metric(
    "smetric_panics_total",
    "Times candidates were taken whatever their health, because fewer than `health.panic_below_percent` were well.",
)
RUNNING = Metric("smetric_instance_running{instance}", "Requests running, as last scraped.")
WAITING = Metric("smetric_instance_waiting{instance}", "Requests waiting, as last scraped.")
KV_USAGE = Metric("smetric_instance_kv_cache_usage_ratio{instance}", "KV blocks in use, as last scraped.")
AGE = Metric("smetric_telemetry_age_seconds{instance}", "Age of the last good scrape.")
SCRAPES = Metric("smetric_telemetry_scrapes_total{instance,result}", "Scrapes of /metrics.")
SCRAPE_SECONDS = Metric("smetric_telemetry_scrape_duration_seconds", "Time a scrape took.", _TTFT)
PROMPT_TOKENS_TOTAL = Metric("smetric_prompt_tokens_total{model}", "Prompt tokens routed to be computed.")
HIT_TOKENS_TOTAL = Metric("smetric_prefix_hit_tokens_total{model}", "Of those, believed cached.")
ACTUAL_HIT_TOKENS_TOTAL = Metric(
    "smetric_prefix_actual_hit_tokens_total{model}", "Of those, cached as the instances reported."
)
HIT_CHECKS = Metric(
    "smetric_prefix_checks_total{instance,source,result}",
    "Answers whose cached tokens were predicted by a source and reported: `equal` (within a block), `over`, `under`.",
)
HIT_WRONG_TOKENS = Metric(
    "smetric_prefix_wrong_tokens_total{instance,source,result}",
    "Tokens by which these predictions were too high (`over`), too low (`under`) or off within a block (`equal`).",
)
HIT_DISAGREES = Metric(
    "smetric_prefix_disagreement{instance,source}",
    "1 while a source's predictions for an instance are wrong by more than a fifth of the prompts, over a minute and "
    "50 answers at least.",
)
PREFIX_TOKENS = Metric(
    "smetric_instance_prefix_tokens_total{instance,found}",
    "Prompt tokens an engine looked up in caches, as last scraped, by where it found them: `local`, `external`, or "
    "`missed`.",
)
CACHE_BREAKS = Metric(
    "smetric_cache_breaks_total{part,change}",
    f"Follow-ups that missed the cache because their client did not continue the last prompt as it was, by the first "
    f"part that differs ({', '.join(BROKEN_PARTS)}) and what became of it ({', '.join(CHANGES)}).",
)
RECORD_LINES = Metric(
    "smetric_record_lines_total{record,result}",
    "Lines of the record (`decisions`, `trace`): `written`, `dropped` as the queue was full, `failed` (see the log).",
)
SHADOW_DECISIONS = Metric(
    "smetric_shadow_decisions_total{policy,agrees}",
    f"Decisions a policy in shadow was asked about, by whether it would have chosen the same: {', '.join(ANSWERS)}.",
)
SHADOW_REGRET_RATIO = Metric(
    "smetric_shadow_regret_ratio{policy}",
    "Where it would have chosen otherwise: how much worse it finds what was chosen, of the larger of the two scores.",
    _SHARE,
)
SHADOW_SESSIONS = Metric(
    "smetric_shadow_sessions_total{policy}", "Conversations it was asked about, as far as remembered."
)
SHADOW_DIVERGED_SESSIONS = Metric(
    "smetric_shadow_diverged_sessions_total{policy}",
    "Of those, conversations it would have sent elsewhere at least once.",
)
SHADOW_SECONDS = Metric("smetric_shadow_duration_seconds{policy}", "Evaluating a policy in shadow.", _MICRO)
ARM_REQUESTS = Metric(
    "smetric_arm_requests_total{route,arm,code}", "Requests answered on each arm, where a route has two."
)
ARM_FIRST_CHUNK_SECONDS = Metric(
    "smetric_arm_time_to_first_chunk_seconds{route,arm}",
    "Arrival to the first output upstream on each arm, where a route has two.",
    _TTFT,
)
GUARDRAIL_RESTORES = Metric(
    "smetric_guardrail_restores_total{route,reason}",
    "Times a policy was restored after a change, by what left its band: `errors` or `imbalance`.",
)
LISTENER_FAILURES = Metric(
    "smetric_listener_failures_total{listener}",
    "Exceptions raised by what records requests, by part; each costs one record, never the request.",
)
IMBALANCE = Metric(
    "smetric_load_imbalance_ratio{model}", "Largest over mean load of its instances that are healthy and not draining."
)
POLICY_INFO = Metric("smetric_policy_info{route,name,hash,generation}", "1 for each policy that acts or shadows.")
POLICY_ERRORS = Metric("smetric_policy_errors_total{policy}", "Evaluations that raised: a bug.")
POLICY_REFUSING = Metric(
    "smetric_policy_refusing_seconds{route,arm}",
    "Seconds for which a policy has refused every request; no series while it routes, or a minute after the last one.",
)
POLICY_RELOADS = Metric("smetric_policy_reloads_total{result}", f"Changes of policies: {', '.join(RELOADS)}.")
INDEX_BLOCKS = Metric("smetric_prefix_index_blocks", "Blocks in the prefix index.")
INDEX_BYTES = Metric("smetric_prefix_index_memory_bytes", "Memory it takes, estimated.")
INDEX_EVICTIONS = Metric("smetric_prefix_index_evictions_total", "Blocks it evicted.")
KV_KNOWN = Metric("smetric_kv_events_known{instance}", "1 while all its KV caches' contents are known from its events.")
KV_EVENTS = Metric(
    "smetric_kv_events_total{instance,result}", "Messages of KV events: `ok`, `replayed`, `repeated`, `malformed`."
)
KV_LAG = Metric(
    "smetric_kv_events_lag_seconds{instance}",
    "From when the engine made its latest message, by its clock, until it was taken here; the longest of its ranks.",
)
KV_GAPS = Metric("smetric_kv_events_gaps_total{instance}", "Gaps in the messages that no replay filled.")
KV_MISSED = Metric("smetric_kv_events_missed_total{instance}", "Messages missed in these gaps.")
KV_ORPHANS = Metric("smetric_kv_events_orphan_blocks_total{instance}", "Blocks stored whose parent was not known.")
KV_INDEX_BLOCKS = Metric("smetric_kv_index_blocks", "Blocks in the index of KV events.")
KV_INDEX_BYTES = Metric("smetric_kv_index_memory_bytes", "Memory it takes, estimated.")
KV_INDEX_REFUSED = Metric("smetric_kv_index_refused_total", "Times a stored block found no room in it.")
PEER_UP = Metric("smetric_peer_up{peer}", "1 while another router takes the placements it is sent.")
PLACEMENTS = Metric(
    "smetric_placements_total{result}",
    "Placements shared with other routers: `sent` and `dropped` once for each peer, `received`, and `refused`: of an "
    "instance or a process of it that is not known here.",
)
SPANS_DROPPED = Metric("smetric_trace_spans_dropped_total", "Spans lost: queue full, export failed, or rejected.")
LOG_LINES_LOST = Metric(
    "smetric_log_lines_lost_total", "Lines of the log that could not be written, for example on a full disk."
)
BUILD_INFO = Metric("smetric_build_info{version,python}", "1 for the running version.")
