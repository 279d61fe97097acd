"""Every name telemetry gives away, with its meaning: span attributes, span names, metrics, log events, headers.

One table, from which the manual and the tests read; nothing here records anything. The `gen_ai.*` names are those of
OpenTelemetry's GenAI conventions 0.1 (status: development), `http.*` and the like those of the stable HTTP conventions.
No attribute may be both a leaf and a prefix of another: some tracing UIs turn dots into trees.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Attribute:
    """A span attribute: OTLP type (string, int, double, bool), unit (empty: none), and one sentence."""

    name: str
    type: str
    unit: str
    doc: str


@dataclass(frozen=True, slots=True)
class Metric:
    """A Prometheus metric: kind (counter, gauge, histogram), labels, one sentence, and a histogram's bounds."""

    name: str
    kind: str
    labels: tuple[str, ...]
    doc: str
    buckets: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Event:
    """A log line's event name, and when it is written."""

    name: str
    doc: str


#: Instrumentation scope of all spans.
SCOPE = "smetric"

# Outcomes of a decision. The sampler keeps every trace whose outcome is not ordinary.
ROUTED = "routed"
PINNED = "pinned"
HELD = "held"
REJECTED = "rejected"
NO_CANDIDATE = "no_candidate"
ERROR = "error"
OUTCOMES = (ROUTED, PINNED, HELD, REJECTED, NO_CANDIDATE, ERROR)
ORDINARY = frozenset({ROUTED, PINNED})

# Why a decision came out as it did.
BY_POLICY = "policy"
BY_PIN = "pinned"
ALL_FILTERED = "all_filtered"
NO_INSTANCE = "no_instance"
ANY_CANDIDATE = "any_candidate"
POLICY_ERROR = "policy_error"
REASONS = (BY_POLICY, BY_PIN, ANY_CANDIDATE, ALL_FILTERED, NO_INSTANCE, POLICY_ERROR)

# Where a decision comes from: a request that is served, one that only asks, a policy in shadow, a probe of our own, a
# record or the ring of the last decisions.
LIVE = "live"
ADVISORY = "advisory"
SHADOW = "shadow"
ORIGIN_PROBE = "probe"
REPLAY = "replay"
ORIGINS = (LIVE, ADVISORY, SHADOW, ORIGIN_PROBE, REPLAY)

# The arms of a route that has a canary.
CONTROL = "control"
CANARY = "canary"
ARMS = (CONTROL, CANARY)

# Whether a shadow chose what was chosen.
AGREES = "true"
DIFFERS = "false"
UNANSWERED = "not_answerable"
SHADOW_FAILED = "error"
ANSWERS = (AGREES, DIFFERS, UNANSWERED, SHADOW_FAILED)

# What became of a policy file that changed, and of one that was undone.
RELOAD_OK = "ok"
RELOAD_KEPT = "kept"
RELOAD_ROLLBACK = "rollback"
RELOAD_GUARDRAIL = "guardrail"
RELOADS = (RELOAD_OK, RELOAD_KEPT, RELOAD_ROLLBACK, RELOAD_GUARDRAIL)

# What a request is refused for before it is decided; the first two by the fleet's want of room, the others by our own.
REFUSALS = ("in_flight", "queue", "bytes", "lag", "memory", "files")
#: The type of the error that clients are told for the latter.
OVERLOADED = "overloaded"
#: What becomes of requests that clients send again.
RETRY_ADMITTED = "admitted"
RETRY_REFUSED = "refused"

# A predicted hit against the reported one: within a block, too high, too low.
HIT_EQUAL = "equal"
HIT_OVER = "over"
HIT_UNDER = "under"
HIT_RESULTS = (HIT_EQUAL, HIT_OVER, HIT_UNDER)

# What breaks a cached prefix, and how.
BROKEN_PARTS = ("tools", "system", "user", "assistant", "tool_result", "template", "cache_salt")
CHANGES = ("changed", "added", "removed", "reordered")

# Results of an upstream attempt.
OK = "ok"
CONNECT_ERROR = "connect_error"
CONNECT_TIMEOUT = "connect_timeout"
#: The router itself had no file descriptor or no local port left for a connection; nothing is said of the instance.
EXHAUSTED = "exhausted"
TIMEOUT = "timeout"
CLOSED = "closed"
PROTOCOL = "protocol"
STATUS_5XX = "5xx"
ABORTED = "aborted"
#: A reused connection died before a byte of the answer, and the request was sent once more: an attempt within one.
RESENT = "resent"
RESULTS = (OK, CONNECT_ERROR, CONNECT_TIMEOUT, EXHAUSTED, TIMEOUT, CLOSED, PROTOCOL, STATUS_5XX, ABORTED, RESENT)

# How instances stand (`smetric.fleet.instance.State`), and why they are left out.
STATES = ("well", "warming", "ejected", "ill", "refusing", "stopping", "draining")
PROBE = "probe"
CONNECT = "connect"
SLOW = "slow"
EJECTION_REASONS = (PROBE, CONNECT, CLOSED, PROTOCOL, TIMEOUT, STATUS_5XX, SLOW)

# Results of a look-up at a service.
LOOKUP_OK = "ok"
LOOKUP_CACHED = "cached"
LOOKUP_NOT_ASKED = "not_asked"
LOOKUP_NO_TOKENS = "no_tokens"
LOOKUP_SUSPENDED = "suspended"
LOOKUP_LATE = "late"
LOOKUP_CONNECT_ERROR = "connect_error"
LOOKUP_HTTP_ERROR = "http_error"
LOOKUP_UNREADABLE = "unreadable"
LOOKUP_RESULTS = (
    LOOKUP_OK,
    LOOKUP_CACHED,
    LOOKUP_NOT_ASKED,
    LOOKUP_NO_TOKENS,
    LOOKUP_SUSPENDED,
    LOOKUP_LATE,
    LOOKUP_CONNECT_ERROR,
    LOOKUP_HTTP_ERROR,
    LOOKUP_UNREADABLE,
)

# Results of reading a prompt's token ids.
TOKENIZE_RESULTS = ("ok", "unsupported", "refused", "unavailable", "busy", "distrusted", "failed")

# What became of placements shared with other routers.
PLACEMENT_SENT = "sent"
PLACEMENT_DROPPED = "dropped"
PLACEMENT_RECEIVED = "received"
PLACEMENT_REFUSED = "refused"
PLACEMENT_RESULTS = (PLACEMENT_SENT, PLACEMENT_DROPPED, PLACEMENT_RECEIVED, PLACEMENT_REFUSED)

# What became of the lines of a record.
RECORD_WRITTEN = "written"
RECORD_DROPPED = "dropped"
RECORD_FAILED = "failed"
RECORD_RESULTS = (RECORD_WRITTEN, RECORD_DROPPED, RECORD_FAILED)

SPANS = {
    "{method} {route}": "SERVER: the request as the client sees it; starts at its arrival.",
    "hold": "INTERNAL: time in the queue before a decision.",
    "route {policy}": "INTERNAL: one decision; a second one follows when the first instance failed.",
    "shadow {policy}": "INTERNAL: what a policy in shadow would have decided in its place.",
    "{operation} {model}": "CLIENT: one attempt on one instance; its traceparent goes upstream.",
}

DECISION_ID = Attribute("smetric.decision.id", "string", "", "ULID of the decision, also in a response header.")
OUTCOME = Attribute("smetric.decision.outcome", "string", "", f"How it ended: {', '.join(OUTCOMES)}.")
REASON = Attribute("smetric.decision.reason", "string", "", f"What settled it: {', '.join(REASONS)}.")
DURATION = Attribute("smetric.decision.duration", "double", "s", "Time the policy took to evaluate.")
SUMMARY = Attribute("smetric.decision.summary", "string", "", "The decision in one sentence.")
LOOKUP_DURATION = Attribute("smetric.lookup.duration", "double", "s", "Time spent on look-ups before the decision.")
HOLD_DURATION = Attribute(
    "smetric.hold.duration", "double", "s", "Time in the queue before the decision, by a rule or for want of a place."
)
ORIGIN = Attribute("smetric.decision.origin", "string", "", f"Where the decision comes from: {', '.join(ORIGINS)}.")
ROUTE = Attribute("smetric.route", "string", "", "Which entry of `routes` the request fell under; `default` for none.")
ARM = Attribute("smetric.arm", "string", "", "`control` or `canary`, where the route has a canary.")
SHADOW_POLICY = Attribute("smetric.shadow.policy", "string", "", "The policies in shadow, separated by commas.")
SHADOW_INSTANCE = Attribute("smetric.shadow.instance.id", "string", "", "What each of them would have chosen.")
SHADOW_AGREES = Attribute("smetric.shadow.agrees", "bool", "", "Whether all of them would have chosen the same.")
SHADOW_REGRET = Attribute(
    "smetric.shadow.regret", "double", "", "How much worse they find what was chosen, 0..1; the largest."
)
SHADOW_DIVERGED = Attribute(
    "smetric.shadow.session_diverged", "bool", "", "One of them chose otherwise before in this conversation."
)
POLICY_NAME = Attribute("smetric.policy.name", "string", "", "Name of the acting policy.")
POLICY_HASH = Attribute("smetric.policy.hash", "string", "", "First 12 hex digits of the SHA-256 of its source.")
POLICY_SOURCE = Attribute("smetric.policy.source", "string", "", "Its file's name, without the folder.")
POLICY_GENERATION = Attribute("smetric.policy.generation", "int", "", "1 for the policy loaded at start, +1 a change.")
POLICY_ORIGIN = Attribute(
    "smetric.policy.origin", "string", "", "How it came to act: `start`, `file`, `rollback`, `guardrail`."
)
POLICY_PARAMS = Attribute(
    "smetric.policy.params", "string", "", "Its parameters' values, `*` where configuration set one."
)
RULE = Attribute("smetric.rule", "string", "", "Label of the rule that fired.")
GUARD_FAILED = Attribute("smetric.guard.failed", "string", "", "Guards that failed on the way, in order.")
CURSOR = Attribute("smetric.cursor", "string", "", "Cursors the decision advances: pick=instance.")
SEED = Attribute("smetric.seed", "int", "", "Seed of the decision's random draws.")
INSTANCE_ID = Attribute("smetric.instance.id", "string", "", "The chosen instance.")
INSTANCE_RANK = Attribute("smetric.instance.rank", "int", "", "0 for the first choice, 1 after a retry.")
CANDIDATES = Attribute("smetric.candidate.count", "int", "", "Instances configured.")
ELIGIBLE = Attribute("smetric.candidate.eligible_count", "int", "", "Instances the policy was given.")
FILTERED = Attribute("smetric.candidate.filtered_count", "int", "", "Of those, how many its filters left out.")
TIED = Attribute("smetric.candidate.tied_count", "int", "", "How many shared the best score.")
FILTER_REASONS = Attribute(
    "smetric.candidate.filter_reasons", "string", "", "Why the others were not given, e.g. `draining=1 model=3`."
)
CANDIDATES_JSON = Attribute("smetric.candidates.json", "string", "", "The foremost candidates as JSON rows, < 2 kB.")
SCORE_CHOSEN = Attribute("smetric.score.chosen", "double", "", "Score of the chosen instance.")
SCORE_RUNNER_UP = Attribute("smetric.score.runner_up", "double", "", "Best score among the others.")
SCORE_MARGIN = Attribute("smetric.score.margin", "double", "", "Distance between these two.")
SCORE_WORST = Attribute("smetric.score.worst", "double", "", "Worst score.")
SCORE_DIRECTION = Attribute("smetric.score.direction", "string", "", "Which end wins: `min` or `max`.")
PROMPT_TOKENS = Attribute("smetric.prompt.tokens", "int", "tokens", "Prompt length the policy saw.")
PROMPT_SOURCE = Attribute("smetric.prompt.tokens_source", "string", "", "How it is known: `exact` or `estimated`.")
HIT_TOKENS = Attribute("smetric.prefix.hit_tokens", "int", "tokens", "Prompt tokens believed cached there.")
HIT_RATIO = Attribute("smetric.prefix.hit_ratio", "double", "", "The same as a share of the prompt.")
HIT_SOURCE = Attribute(
    "smetric.prefix.source",
    "string",
    "",
    "Who said so, tier included where there are several: `prefix_index`, `lmcache:host`.",
)
ACTUAL_HIT_TOKENS = Attribute(
    "smetric.prefix.actual_hit_tokens", "int", "tokens", "Prompt tokens the instance says it had cached."
)
TURN = Attribute("smetric.request.turn", "int", "", "Turns of the session before this request; 0 for the first.")
EST_HIT = Attribute("smetric.request.est_hit", "int", "tokens", "Length of the history the request carries.")
SESSION_HASH = Attribute("smetric.session.id_hash", "string", "", "Keyed hash of the session id; the id never shows.")
MAX_AGE = Attribute("smetric.telemetry.max_age", "double", "s", "Age of the oldest measured value in the snapshot.")
CHOSEN_AGE = Attribute("smetric.telemetry.chosen_age", "double", "s", "The same of the chosen instance.")
LOAD_REQUESTS = Attribute("smetric.load.requests", "double", "requests", "Requests on the chosen, as the policy saw.")
LOAD_RUNNING = Attribute("smetric.load.running", "double", "requests", "Running there, where the policy read it.")
LOAD_WAITING = Attribute("smetric.load.waiting", "double", "requests", "Waiting there, where the policy read it.")
LOAD_KV_USAGE = Attribute("smetric.load.kv_usage", "double", "", "Share of KV blocks in use there, where it read it.")
ATTEMPT = Attribute("smetric.upstream.attempt", "int", "", "1 for the first attempt of a request.")
RESULT = Attribute("smetric.upstream.result", "string", "", f"How the attempt ended: {', '.join(RESULTS)}.")

HTTP_METHOD = Attribute("http.request.method", "string", "", "The method; `_OTHER` when it is not a known one.")
HTTP_ROUTE = Attribute("http.route", "string", "", "The matched route template.")
HTTP_STATUS = Attribute("http.response.status_code", "int", "", "The status answered.")
HTTP_RESEND = Attribute("http.request.resend_count", "int", "", "Attempts before this one.")
URL_PATH = Attribute("url.path", "string", "", "The path, bounded, without the query.")
URL_SCHEME = Attribute("url.scheme", "string", "", "`http` or `https`.")
URL_FULL = Attribute("url.full", "string", "", "Where the attempt went, without a query.")
SERVER_ADDRESS = Attribute("server.address", "string", "", "Address the connection was made to.")
SERVER_PORT = Attribute("server.port", "int", "", "Port the connection was made to.")
CLIENT_ADDRESS = Attribute("client.address", "string", "", "Address of the peer.")
PROTOCOL_VERSION = Attribute("network.protocol.version", "string", "", "HTTP version: `1.1`, `2`.")
ERROR_TYPE = Attribute("error.type", "string", "", "What went wrong, from a closed list or the status.")

GEN_AI_OPERATION = Attribute("gen_ai.operation.name", "string", "", "`chat` or `text_completion`.")
GEN_AI_PROVIDER = Attribute("gen_ai.provider.name", "string", "", "`vllm`.")
GEN_AI_MODEL = Attribute("gen_ai.request.model", "string", "", "The model asked for, bounded.")
GEN_AI_STREAM = Attribute("gen_ai.request.stream", "bool", "", "Whether the answer is streamed.")
GEN_AI_TTFC = Attribute(
    "gen_ai.response.time_to_first_chunk", "double", "s", "From sending the attempt to its first body byte."
)
GEN_AI_INPUT = Attribute("gen_ai.usage.input_tokens", "int", "tokens", "Prompt tokens the instance counted.")
GEN_AI_OUTPUT = Attribute("gen_ai.usage.output_tokens", "int", "tokens", "Tokens it generated.")
GEN_AI_CACHED = Attribute("gen_ai.usage.cache_read.input_tokens", "int", "tokens", "Prompt tokens from its cache.")

UI_KIND = Attribute("openinference.span.kind", "string", "", "`CHAIN`; a hint for tracing UIs.")
UI_INPUT = Attribute("input.value", "string", "", "The request's numbers as JSON; never its text.")
UI_INPUT_TYPE = Attribute("input.mime_type", "string", "", "`application/json`.")
UI_OUTPUT = Attribute("output.value", "string", "", "Summary, blank line, table of the foremost candidates, < 2 kB.")
UI_OUTPUT_TYPE = Attribute("output.mime_type", "string", "", "`text/plain`.")
UI_SESSION = Attribute("session.id", "string", "", "The session's keyed hash again, under the name UIs group by.")

_MS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1)
_MICRO = (0.00001, 0.00002, 0.00005, 0.0001, 0.0002, 0.0005, *_MS)
_LAG = (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_DURATION = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
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
REQUESTS = Metric("smetric_requests_total", "counter", ("route", "code"), "Requests answered.")
REQUEST_SECONDS = Metric(
    "smetric_request_duration_seconds", "histogram", ("route", "model"), "Arrival to end of the answer.", _DURATION
)
FIRST_CHUNK_SECONDS = Metric(
    "smetric_time_to_first_chunk_seconds", "histogram", ("model",), "Arrival to the first body byte upstream.", _TTFT
)
OVERHEAD_SECONDS = Metric(
    "smetric_overhead_seconds", "histogram", (), "Arrival to the first attempt, look-ups included.", _MICRO
)
ATTEMPTS = Metric("smetric_upstream_attempts_total", "counter", ("instance", "result"), "Attempts on instances.")
RETRIES_REFUSED = Metric(
    "smetric_retries_refused_total", "counter", (), "Failed attempts not tried elsewhere: the retry budget was spent."
)
IN_PROGRESS = Metric("smetric_requests_in_progress", "gauge", (), "Requests that arrived and have not ended.")
INFLIGHT = Metric("smetric_inflight_requests", "gauge", ("instance",), "Sequences sent to an instance and not ended.")
UNPREFILLED = Metric("smetric_unprefilled_tokens", "gauge", ("instance",), "Tokens sent there, first byte not back.")
REFUSED = Metric(
    "smetric_requests_refused_total",
    "counter",
    ("reason",),
    f"Requests refused before anything was decided, by what there was too much of: {', '.join(REFUSALS)}.",
)
CLIENT_RETRIES = Metric(
    "smetric_client_retries_total",
    "counter",
    ("result",),
    "Requests that clients said they send again (`x-stainless-retry-count`): `admitted` or `refused`.",
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
    "For autoscalers: 1 when full, more when more is asked for. Of the `instances` and of the `router` itself.",
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
PROMPT_TOKENS_TOTAL = Metric("smetric_prompt_tokens_total", "counter", ("model",), "Prompt tokens routed.")
HIT_TOKENS_TOTAL = Metric("smetric_prefix_hit_tokens_total", "counter", ("model",), "Of those, believed cached.")
ACTUAL_HIT_TOKENS_TOTAL = Metric(
    "smetric_prefix_actual_hit_tokens_total", "counter", ("model",), "Of those, cached as the instances said."
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
    (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9, 1.0),
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
IMBALANCE = Metric("smetric_load_imbalance_ratio", "gauge", ("model",), "Largest over mean load of its instances.")
POLICY_INFO = Metric(
    "smetric_policy_info", "gauge", ("route", "name", "hash", "generation"), "1 for each policy that acts or shadows."
)
POLICY_ERRORS = Metric("smetric_policy_errors_total", "counter", ("policy",), "Evaluations that raised: a bug.")
POLICY_RELOADS = Metric(
    "smetric_policy_reloads_total", "counter", ("result",), f"Changes of policies: {', '.join(RELOADS)}."
)
INDEX_BLOCKS = Metric("smetric_prefix_index_blocks", "gauge", (), "Blocks in the prefix index.")
INDEX_BYTES = Metric("smetric_prefix_index_memory_bytes", "gauge", (), "Memory it takes, estimated.")
INDEX_EVICTIONS = Metric("smetric_prefix_index_evictions_total", "counter", (), "Blocks it evicted.")
KV_KNOWN = Metric(
    "smetric_kv_events_known", "gauge", ("instance",), "1 while all its KV caches' contents are known from its events."
)
KV_MESSAGES = Metric(
    "smetric_kv_events_messages_total",
    "counter",
    ("instance", "result"),
    "Messages of KV events: `ok`, `replayed`, `repeated`, `malformed`.",
)
KV_MISSED = Metric(
    "smetric_kv_events_missed_total", "counter", ("instance",), "Messages missed that no replay brought back."
)
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
SPANS_DROPPED = Metric("smetric_trace_spans_dropped_total", "counter", (), "Spans lost: queue full or export failed.")
BUILD_INFO = Metric("smetric_build_info", "gauge", ("version", "python"), "1 for the running version.")

REQUEST_EVENT = Event("request", "Info: one line per request, when it has ended.")
RELOADED_EVENT = Event("smetric.policy.reloaded", "Info: the policy file changed and its new policy acts.")
KEPT_EVENT = Event("smetric.policy.kept", "Error: the policy file changed but cannot be used; the last good one stays.")
RESTORED_EVENT = Event(
    "smetric.policy.restored",
    "Warning: an operator restored an earlier generation of a policy. Error: the guardrail did, after a change.",
)
SHADOW_FAILED_EVENT = Event(
    "smetric.shadow.failed",
    "Error: a policy in shadow raised: a bug. Once a minute for each; `kept_back` counts the rest.",
)
FAILED_EVENT = Event("smetric.policy.failed", "Error: the policy raised while it was evaluated: a bug.")
RESTARTED_EVENT = Event("smetric.instance.restarted", "Warning: a new process answers; its cache counts as empty.")
CHANGED_EVENT = Event(
    "smetric.instance.changed", "Warning or info: an instance stands otherwise than before: its `state`."
)
DRAINED_EVENT = Event("smetric.drains.drained", "Warning: an operator drains an instance; requests under way there.")
UNDRAINED_EVENT = Event("smetric.drains.undrained", "Info: an operator lets an instance be a candidate again.")
DRAINS_RESTORED_EVENT = Event("smetric.drains.restored", "Info: at start, the instances drained before it.")
DRAINS_UNREADABLE_EVENT = Event("smetric.drains.unreadable", "Warning: the file of drained instances cannot be read.")
DRAINS_NOT_KEPT_EVENT = Event("smetric.drains.not_kept", "Warning: the file of drained instances cannot be written.")
PROBE_CRASHED_EVENT = Event("smetric.probe.crashed", "Error: probing an instance raised: a bug; it goes on.")
SCRAPE_EVENT = Event("smetric.scrape.changed", "Warning: scrapes of an instance began to end otherwise than before.")
CRASHED_EVENT = Event("smetric.scrape.crashed", "Error: scraping an instance raised: a bug; it goes on.")
MODELS_EVENT = Event(
    "smetric.models.unreadable", "Warning: an instance's model list cannot be read; the old one stays."
)
INDEX_RESTORED_EVENT = Event(
    "smetric.index.restored", "Info: what a file or a peer knew of an instance was taken in, or was of another process."
)
INDEX_CLEARED_EVENT = Event(
    "smetric.index.cleared", "Warning: an instance reported no hits where there were some: its cache counts as cleared."
)
INDEX_UNREADABLE_EVENT = Event("smetric.index.unreadable", "Warning: the index's file cannot be read; it starts empty.")
INDEX_NOT_SAVED_EVENT = Event("smetric.index.not_saved", "Warning: the index's file cannot be written.")
INDEX_FAILED_EVENT = Event("smetric.index.failed", "Error: writing the index's file raised: a bug; it goes on.")
HITS_DISAGREE_EVENT = Event(
    "smetric.hits.disagree",
    "Warning: for a minute and 50 answers a source's predicted hits for an instance were wrong by more than a fifth of "
    "the prompts; `smetric doctor` says why.",
)
HITS_AGREE_EVENT = Event("smetric.hits.agree", "Info: they are wrong by less than a tenth again.")
PEER_CHANGED_EVENT = Event("smetric.peer.changed", "Warning: a peer began to take placements, or to fail otherwise.")
PEER_NO_IMAGE_EVENT = Event("smetric.peer.no_image", "Info or warning: a peer did not say what it knows.")
PEER_SILENT_EVENT = Event(
    "smetric.peer.silent", "Warning: another router has not been heard for three heartbeats; what it places is missed."
)
PEER_FAILED_EVENT = Event("smetric.peer.failed", "Error: sharing placements raised and has ended: a bug.")
LOOKUP_SUSPENDED_EVENT = Event(
    "smetric.lookup.suspended", "Warning: a lookup service failed several times in a row; it is left alone for a while."
)
LOOKUP_RESUMED_EVENT = Event("smetric.lookup.resumed", "Info: a lookup service that was left alone answers again.")
SOURCE_FAILED_EVENT = Event(
    "smetric.source.failed", "Error: a source raised: a bug. Once a minute for each; `kept_back` counts the rest."
)
TOKENIZE_UNAVAILABLE_EVENT = Event(
    "smetric.tokenize.unavailable",
    "Warning: an instance failed to tokenise several times; it is not asked for a while.",
)
TOKENIZE_DISTRUSTED_EVENT = Event(
    "smetric.tokenize.distrusted",
    "Warning: the ids of a model were not as many as its engine counted, several times; none are used for a minute.",
)
TOKENIZE_WHOLE_EVENT = Event(
    "smetric.tokenize.whole", "Warning: a tokenizer cannot be remembered in segments; every prompt is encoded whole."
)
TOKENIZE_FAILED_EVENT = Event("smetric.tokenize.failed", "Error: tokenising raised: a bug; the ids stay unknown.")
KV_CHANGED_EVENT = Event(
    "smetric.kv_events.changed",
    "Info: an instance's cache contents became known from its events. Warning: they no longer are, and why: "
    "`joined_late`, `behind`, `gap`, `malformed`, `unknown_block`, `unsupported`.",
)
KV_RESTARTED_EVENT = Event(
    "smetric.kv_events.restarted", "Warning: an engine's numbering began anew: a new process, whose cache is empty."
)
KV_NO_REPLAY_EVENT = Event(
    "smetric.kv_events.no_replay", "Warning: an engine's replay socket did not answer; what was missed stays unknown."
)
KV_FAILED_EVENT = Event("smetric.kv_events.failed", "Error: an address cannot be used; it is tried again.")
KV_CRASHED_EVENT = Event("smetric.kv_events.crashed", "Error: reading events raised: a bug; it begins again.")
SERVING_EVENT = Event("smetric.serving", "Info: both ports are open.")
ENDPOINT_EVENT = Event("smetric.request.failed", "Error: an endpoint raised, and the client was answered 500: a bug.")
ADMIN_REFUSED_EVENT = Event(
    "smetric.admin.refused",
    "Warning: somebody asked the admin port without its token, or a web page did; at most ten a minute of one address.",
)
ADMIN_CHANGED_EVENT = Event("smetric.admin.changed", "Info: an operator changed something over the admin port.")
CREDENTIAL_EVENT = Event(
    "smetric.credential.kept", "Warning: a secret's file changed but cannot be read; the secret it held before is used."
)
ODD_ADDRESS_EVENT = Event(
    "smetric.instance.odd_address", "Warning: an instance's name leads to addresses where none can be; none is used."
)
STOP_FAILED_EVENT = Event("smetric.stop.failed", "Error: a part of the router raised when it was to end: a bug.")
RECORD_NOT_WRITTEN_EVENT = Event(
    "smetric.record.not_written", "Error: a record cannot be written; once, until it can be again."
)
RECORD_FAILED_EVENT = Event(
    "smetric.record.failed", "Error: a line could not be made: a bug. Once a minute; `kept_back` counts the rest."
)
RECORD_RESUMED_EVENT = Event("smetric.record.resumed", "Info: a record that could not be written is written again.")
READY_EVENT = Event("smetric.ready", "Info: requests are served.")
DRAINING_EVENT = Event("smetric.draining", "Info: told to end; requests under way are finished.")
HYPERCORN_EVENT = Event(
    "smetric.hypercorn.unknown", "Warning: a Hypercorn this version does not know; its own HTTP/1.1 serves instead."
)
OVERLOAD_EVENT = Event(
    "smetric.overload.changed",
    "Warning or info: the router came to be short of a resource (`lag`, `memory`, `files`), or no longer is: its "
    "`state` is `soft`, `hard` or `calm`.",
)
CONNECTIONS_FULL_EVENT = Event(
    "smetric.connections.full", "Warning: the connection cap is reached; so many clients were turned away."
)
CONNECTION_FAILED_EVENT = Event("smetric.connection.failed", "Error: serving a connection raised: a bug.")
CUT_OFF_EVENT = Event(
    "smetric.cut_off", "Warning: the drain deadline has come; so many requests, maybe none, were cut off."
)
NOT_TOLD_EVENT = Event("smetric.supervisor.not_told", "Warning: the supervisor that asks to be told cannot be reached.")
STOPPED_EVENT = Event("smetric.stopped", "Info: everything has ended.")
TRACING_EVENT = Event("smetric.tracing", "Info: at start, whether traces are exported and where to.")
DOCTOR_EVENT = Event("smetric.doctor.failed", "Critical: a check of `smetric doctor` raised: a bug.")
LIBRARY_EVENT = Event("library", "A record of a library's own logger, at most one a minute for each message.")

ATTRIBUTES = tuple(value for value in list(globals().values()) if isinstance(value, Attribute))
METRICS = tuple(value for value in list(globals().values()) if isinstance(value, Metric))
EVENTS = tuple(value for value in list(globals().values()) if isinstance(value, Event))
