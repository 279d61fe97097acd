"""Span names and attributes."""

from __future__ import annotations

from dataclasses import dataclass


class Attribute(str):
    """Name of a span attribute.

    Args:
        name: the name.
        doc: one sentence.
        type: OTLP type: string, int, double, bool, string[].
        unit: empty for none.
    """

    doc: str
    type: str
    unit: str

    def __new__(cls, name: str, doc: str, type: str = "string", unit: str = "") -> Attribute:
        """Make the name, with what is said of it."""
        self = super().__new__(cls, name)
        self.doc, self.type, self.unit = doc, type, unit
        return self

    @property
    def name(self) -> str:
        """The name."""
        return str(self)


@dataclass(frozen=True, slots=True)
class Metric:
    """A Prometheus metric: kind (counter, gauge, histogram), labels, one sentence, and a histogram's bounds."""

    name: str
    kind: str
    labels: tuple[str, ...]
    doc: str
    buckets: tuple[float, ...] = ()


# The closed lists of values that attributes and labels take.

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
#: What else a trace is kept for: a later turn went elsewhere than where most of its prompt is, or than the last one.
MIGRATION = "migration"
KEPT = (HELD, REJECTED, NO_CANDIDATE, ERROR, MIGRATION)

# What took a later turn away where no guard did.
LEFT_OUT = "left out"
NOT_PICKED = "not picked"

# Why a request waited in the queue.
HELD_BY_RULE = "rule"
HELD_FOR_PLACE = "place"
HOLD_REASONS = (HELD_BY_RULE, HELD_FOR_PLACE)

# Where a later turn went, beside the last one; and where a prompt's tokens were believed to be, when it was decided.
SAME_INSTANCE = "same"
OTHER_INSTANCE = "other"
PLACES = (SAME_INSTANCE, OTHER_INSTANCE)
HELD_HERE = "local"
HELD_ELSEWHERE = "global"
HELD_NOWHERE = "missed"
HOLDERS = (HELD_HERE, HELD_ELSEWHERE, HELD_NOWHERE)

# What a decision did beside the other one it might have been.
SAVED = "saved"
LOST = "lost"

# Why a decision came out as it did.
BY_POLICY = "policy"
BY_PIN = "pinned"
ALL_FILTERED = "all_filtered"
NO_INSTANCE = "no_instance"
ANY_CANDIDATE = "any_candidate"
POLICY_ERROR = "policy_error"
REASONS = (BY_POLICY, BY_PIN, ANY_CANDIDATE, ALL_FILTERED, NO_INSTANCE, POLICY_ERROR)

# Where a decision comes from: a request that is served, a policy in shadow, or what was decided before and is evaluated
# again, from a record or from the ring of the last decisions.
LIVE = "live"
SHADOW = "shadow"
REPLAY = "replay"
ORIGINS = (LIVE, SHADOW, REPLAY)

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

# What makes the guardrail restore a policy.
ERRORS = "errors"
IMBALANCED = "imbalance"
OUT_OF_BAND = (ERRORS, IMBALANCED)

# What a request is refused for before it is decided; the first two by the fleet's want of room, the others by our own.
NO_ROOM = ("in_flight", "queue")
REFUSALS = (*NO_ROOM, "bytes", "lag", "memory", "files")
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

# Why a failed attempt is not tried elsewhere: retries are bounded, a `reject` rule says so, the last two as refusals.
BUDGET = "budget"
NOT_RETRIED = (BUDGET, REJECTED, *NO_ROOM)

# What ended an answer where neither the instance nor the request itself was at fault.
CLIENT_GONE = "client_gone"
CLIENT_STALLED = "client_stalled"
SHUTDOWN = "shutdown"

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


# The spans, and the attributes they carry.
#
# The `gen_ai.*` names are those of OpenTelemetry's GenAI conventions 0.1 (status: development), `http.*` and the like
# those of the stable HTTP conventions. No attribute may be both a leaf and a prefix of another: some tracing UIs turn
# dots into trees.

SPANS = {
    "{method} {route}": "SERVER: the request as the client sees it; starts at its arrival.",
    "hold": "INTERNAL: time in the queue before a decision.",
    "route {policy}": "INTERNAL: one decision; a second one follows when the first instance failed.",
    "shadow {policy}": "INTERNAL: what a policy in shadow would have decided in its place.",
    "{operation} {model}": "CLIENT: one attempt on one instance; its traceparent goes upstream.",
}

DECISION_ID = Attribute("smetric.decision.id", "ULID of the decision, also in a response header.")
OUTCOME = Attribute("smetric.decision.outcome", f"How it ended: {', '.join(OUTCOMES)}.")
REASON = Attribute("smetric.decision.reason", f"What settled it: {', '.join(REASONS)}.")
DURATION = Attribute("smetric.decision.duration", "Time the policy took to evaluate.", "double", "s")
SUMMARY = Attribute("smetric.decision.summary", "The decision in one sentence.")
LOOKUP_DURATION = Attribute("smetric.lookup.duration", "Time spent on look-ups before the decision.", "double", "s")
HOLD_DURATION = Attribute(
    "smetric.hold.duration", "Time in the queue before the decision, by a rule or for want of a place.", "double", "s"
)
HOLD_REASON = Attribute("smetric.hold.reason", f"What it waited for: {', '.join(HOLD_REASONS)}; on the `hold` span.")
ORIGIN = Attribute("smetric.decision.origin", f"Where the decision comes from: {', '.join(ORIGINS)}.")
ROUTE = Attribute("smetric.route", "Which entry of `routes` the request fell under; `default` for none.")
ARM = Attribute("smetric.arm", "`control` or `canary`, where the route has a canary.")
SHADOW_POLICY = Attribute("smetric.shadow.policy", "The policies in shadow, separated by commas.")
SHADOW_INSTANCE = Attribute("smetric.shadow.instance.id", "What each of them would have chosen.")
SHADOW_AGREES = Attribute("smetric.shadow.agrees", "Whether all of them would have chosen the same.", "bool")
SHADOW_REGRET = Attribute(
    "smetric.shadow.regret", "How much worse they find what was chosen, 0..1; the largest.", "double"
)
SHADOW_DIVERGED = Attribute(
    "smetric.shadow.session_diverged", "One of them chose otherwise before in this conversation.", "bool"
)
POLICY_NAME = Attribute("smetric.policy.name", "Name of the acting policy.")
POLICY_HASH = Attribute("smetric.policy.hash", "First 12 hex digits of the SHA-256 of its source.")
POLICY_SOURCE = Attribute("smetric.policy.source", "Its file's name, without the folder.")
POLICY_GENERATION = Attribute("smetric.policy.generation", "1 for the policy loaded at start, +1 a change.", "int")
POLICY_ORIGIN = Attribute("smetric.policy.origin", "How it came to act: `start`, `file`, `rollback`, `guardrail`.")
POLICY_PARAMS = Attribute("smetric.policy.params", "Its parameters' values, `*` where configuration set one.")
RULE = Attribute("smetric.rule", "Label of the rule that fired.")
GUARD_FAILED = Attribute("smetric.guard.failed", "Guards that failed on the way, in order.")
CURSOR = Attribute("smetric.cursor", "Cursors the decision advances: pick=instance.")
SEED = Attribute("smetric.seed", "Seed of the decision's random draws.", "int")
INSTANCE_ID = Attribute("smetric.instance.id", "The chosen instance.")
INSTANCE_RANK = Attribute("smetric.instance.rank", "0 for the first choice, 1 after a retry.", "int")
RUNNER_UP = Attribute("smetric.instance.runner_up", "The best of the others by score.")
MIGRATED_FROM = Attribute(
    "smetric.migration.from",
    "Set where a later turn went elsewhere: the instance with most of its prompt, else the one of the last turn.",
)
MIGRATION_GUARD = Attribute(
    "smetric.migration.guard",
    f"What took it away: a guard, a filter, `{LEFT_OUT}` (it was no candidate) or `{NOT_PICKED}`.",
)
MIGRATION_TOKENS = Attribute(
    "smetric.migration.left_tokens", "Prompt tokens left behind there, where that is known.", "int", "tokens"
)
FORECAST_TTFT = Attribute(
    "smetric.forecast.ttft", "Time to first token that was expected of the chosen instance.", "double", "s"
)
FORECAST_OTHER = Attribute(
    "smetric.forecast.other", "The instance it is compared with: the one a migration left, else the next."
)
FORECAST_OTHER_TTFT = Attribute("smetric.forecast.other_ttft", "The same of that one.", "double", "s")
CANDIDATES = Attribute("smetric.candidate.count", "Instances configured.", "int")
ELIGIBLE = Attribute("smetric.candidate.eligible_count", "Instances the policy was given.", "int")
FILTERED = Attribute("smetric.candidate.filtered_count", "Of those, how many its filters left out.", "int")
TIED = Attribute("smetric.candidate.tied_count", "How many shared the best score.", "int")
FILTER_REASONS = Attribute(
    "smetric.candidate.filter_reasons", "Why the others were not given, e.g. `draining=1 model=3`."
)
CANDIDATES_JSON = Attribute("smetric.candidates.json", "The foremost candidates as JSON rows, < 2 kB.")
SCORE_CHOSEN = Attribute("smetric.score.chosen", "Score of the chosen instance.", "double")
SCORE_RUNNER_UP = Attribute("smetric.score.runner_up", "Best score among the others.", "double")
SCORE_MARGIN = Attribute("smetric.score.margin", "Distance between these two.", "double")
SCORE_WORST = Attribute("smetric.score.worst", "Worst score.", "double")
SCORE_DIRECTION = Attribute("smetric.score.direction", "Which end wins: `min` or `max`.")
PROMPT_TOKENS = Attribute("smetric.prompt.tokens", "Prompt length the policy saw.", "int", "tokens")
PROMPT_SOURCE = Attribute("smetric.prompt.tokens_source", "How it is known: `exact` or `estimated`.")
HIT_TOKENS = Attribute("smetric.prefix.hit_tokens", "Prompt tokens believed cached there.", "int", "tokens")
HIT_RATIO = Attribute("smetric.prefix.hit_ratio", "The same as a share of the prompt.", "double")
HIT_SOURCE = Attribute(
    "smetric.prefix.source", "Who said so, tier included where there are several: `prefix_index`, `lmcache:host`."
)
ACTUAL_HIT_TOKENS = Attribute(
    "smetric.prefix.actual_hit_tokens", "Prompt tokens the instance says it had cached.", "int", "tokens"
)
TURN = Attribute("smetric.request.turn", "Turns of the session before this request; 0 for the first.", "int")
EST_HIT = Attribute("smetric.request.est_hit", "Length of the history the request carries.", "int", "tokens")
SESSION_HASH = Attribute("smetric.session.id_hash", "Keyed hash of the session id; the id never shows.")
MAX_AGE = Attribute("smetric.telemetry.max_age", "Age of the oldest measured value in the snapshot.", "double", "s")
CHOSEN_AGE = Attribute("smetric.telemetry.chosen_age", "The same of the chosen instance.", "double", "s")
LOAD_REQUESTS = Attribute("smetric.load.requests", "Requests on the chosen, as the policy saw.", "double", "requests")
LOAD_RUNNING = Attribute("smetric.load.running", "Running there, where the policy read it.", "double", "requests")
LOAD_WAITING = Attribute("smetric.load.waiting", "Waiting there, where the policy read it.", "double", "requests")
LOAD_KV_USAGE = Attribute("smetric.load.kv_usage", "Share of KV blocks in use there, where it read it.", "double")
ATTEMPT = Attribute("smetric.upstream.attempt", "1 for the first attempt of a request.", "int")
RESULT = Attribute("smetric.upstream.result", f"How the attempt ended: {', '.join(RESULTS)}.")
GAVE_UP = Attribute(
    "smetric.upstream.gave_up",
    f"On the request's own span: what kept it from being tried elsewhere, {', '.join(NOT_RETRIED)}.",
)

HTTP_METHOD = Attribute("http.request.method", "The method; `_OTHER` when it is not a known one.")
HTTP_ROUTE = Attribute("http.route", "The matched route template.")
HTTP_STATUS = Attribute("http.response.status_code", "The status answered.", "int")
HTTP_RESEND = Attribute("http.request.resend_count", "Attempts before this one.", "int")
URL_PATH = Attribute("url.path", "The path, bounded, without the query.")
URL_SCHEME = Attribute("url.scheme", "`http` or `https`.")
URL_FULL = Attribute("url.full", "Where the attempt went, without a query.")
SERVER_ADDRESS = Attribute("server.address", "Address the connection was made to.")
SERVER_PORT = Attribute("server.port", "Port the connection was made to.", "int")
CLIENT_ADDRESS = Attribute("client.address", "Address of the peer.")
PROTOCOL_VERSION = Attribute("network.protocol.version", "HTTP version: `1.1`, `2`.")
ERROR_TYPE = Attribute("error.type", "What went wrong, from a closed list or the status.")

GEN_AI_OPERATION = Attribute(
    "gen_ai.operation.name", "`chat`, `text_completion`, else the path after `/v1/`: `embeddings`, `rerank`."
)
GEN_AI_PROVIDER = Attribute("gen_ai.provider.name", "`vllm`.")
GEN_AI_MODEL = Attribute("gen_ai.request.model", "The model asked for, bounded.")
GEN_AI_STREAM = Attribute("gen_ai.request.stream", "Whether the answer is streamed.", "bool")
GEN_AI_TTFC = Attribute(
    "gen_ai.response.time_to_first_chunk", "From sending the attempt to its first body byte.", "double", "s"
)
GEN_AI_FINISH = Attribute(
    "gen_ai.response.finish_reasons", "Why the instance ended its answer: `stop`, `length`, ….", "string[]"
)
GEN_AI_INPUT = Attribute("gen_ai.usage.input_tokens", "Prompt tokens the instance counted.", "int", "tokens")
GEN_AI_OUTPUT = Attribute("gen_ai.usage.output_tokens", "Tokens it generated.", "int", "tokens")
GEN_AI_CACHED = Attribute("gen_ai.usage.cache_read.input_tokens", "Prompt tokens from its cache.", "int", "tokens")

UI_KIND = Attribute("openinference.span.kind", "`CHAIN`; a hint for tracing UIs.")
UI_INPUT = Attribute("input.value", "The request's numbers as JSON; never its text.")
UI_INPUT_TYPE = Attribute("input.mime_type", "`application/json`.")
UI_OUTPUT = Attribute("output.value", "Summary, blank line, table of the foremost candidates, < 2 kB.")
UI_OUTPUT_TYPE = Attribute("output.mime_type", "`text/plain`.")
UI_SESSION = Attribute("session.id", "The session's keyed hash again, under the name UIs group by.")
