"""Names of spans and their attributes, and the closed lists of values of attributes and labels."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property


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


@dataclass(frozen=True)
class Metric:
    """A Prometheus metric.

    Args:
        series: its name, and its labels in braces, as in `smetric_lookups_total{source,result}`.
        doc: one sentence.
        buckets: upper bounds of a histogram.
    """

    series: str
    doc: str
    buckets: tuple[float, ...] = ()

    @cached_property
    def name(self) -> str:
        """The name."""
        return self.series.partition("{")[0]

    @cached_property
    def labels(self) -> tuple[str, ...]:
        """Names of the labels."""
        return tuple(filter(None, self.series.partition("{")[2].removesuffix("}").split(",")))

    @property
    def kind(self) -> str:
        """One of counter, gauge, histogram."""
        return "histogram" if self.buckets else "counter" if self.name.endswith("_total") else "gauge"


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
#: Another reason to keep a trace: a later turn left the instance with most of its prompt, or the last one.
MIGRATION = "migration"
KEPT = (HELD, REJECTED, NO_CANDIDATE, ERROR, MIGRATION)

# Reasons of a migration without a guard.
LEFT_OUT = "left out"
NOT_PICKED = "not picked"

# Reasons to wait in the queue.
HELD_BY_RULE = "rule"
HELD_FOR_PLACE = "place"
HOLD_REASONS = (HELD_BY_RULE, HELD_FOR_PLACE)

# Place of a later turn compared with the last one; place of a prompt's tokens when it was decided.
SAME_INSTANCE = "same"
OTHER_INSTANCE = "other"
PLACES = (SAME_INSTANCE, OTHER_INSTANCE)
HELD_HERE = "local"
HELD_IN_STORE = "store"
HELD_ELSEWHERE = "elsewhere"
HELD_NOWHERE = "missed"
HOLDERS = (HELD_HERE, HELD_IN_STORE, HELD_ELSEWHERE, HELD_NOWHERE)

# Result of a decision compared with the alternative.
SAVED = "saved"
LOST = "lost"

# Reasons of an outcome.
BY_POLICY = "policy"
BY_PIN = "pinned"
ALL_FILTERED = "all_filtered"
NO_INSTANCE = "no_instance"
ANY_CANDIDATE = "any_candidate"
POLICY_ERROR = "policy_error"
REASONS = (BY_POLICY, BY_PIN, ANY_CANDIDATE, ALL_FILTERED, NO_INSTANCE, POLICY_ERROR)

# Origins of a decision: a request, a policy in shadow, or a recorded decision that is evaluated again.
LIVE = "live"
SHADOW = "shadow"
REPLAY = "replay"
ORIGINS = (LIVE, SHADOW, REPLAY)

# The arms of a route that has a canary.
CONTROL = "control"
CANARY = "canary"
ARMS = (CONTROL, CANARY)

# Agreement of a policy in shadow with the choice.
AGREES = "true"
DIFFERS = "false"
UNANSWERED = "not_answerable"
SHADOW_FAILED = "error"
ANSWERS = (AGREES, DIFFERS, UNANSWERED, SHADOW_FAILED)

# Results of a change of a policy file, and of an undo.
RELOAD_OK = "ok"
RELOAD_KEPT = "kept"
RELOAD_ROLLBACK = "rollback"
RELOAD_GUARDRAIL = "guardrail"
RELOADS = (RELOAD_OK, RELOAD_KEPT, RELOAD_ROLLBACK, RELOAD_GUARDRAIL)

# Reasons of the guardrail to restore a policy.
ERRORS = "errors"
IMBALANCED = "imbalance"
OUT_OF_BAND = (ERRORS, IMBALANCED)

# Reasons to refuse a request before a decision: the fleet has no room, or the router itself has none.
NO_ROOM = ("in_flight", "queue")
REFUSALS = (*NO_ROOM, "bytes", "lag", "memory", "files")
#: Type of the error for the latter.
OVERLOADED = "overloaded"
#: Results of requests that clients send again.
RETRY_ADMITTED = "admitted"
RETRY_REFUSED = "refused"

# A predicted hit against the reported one: within a block, too high, too low.
HIT_EQUAL = "equal"
HIT_OVER = "over"
HIT_UNDER = "under"
HIT_RESULTS = (HIT_EQUAL, HIT_OVER, HIT_UNDER)

# Parts of a prompt that break a cached prefix, and their changes.
BROKEN_PARTS = ("tools", "system", "user", "assistant", "tool_result", "template", "cache_salt")
CHANGES = ("changed", "added", "removed", "reordered")

# Results of an upstream attempt.
OK = "ok"
CONNECT_ERROR = "connect_error"
CONNECT_TIMEOUT = "connect_timeout"
#: The router itself had no file descriptor or no local port left for a connection.
EXHAUSTED = "exhausted"
TIMEOUT = "timeout"
CLOSED = "closed"
PROTOCOL = "protocol"
STATUS_5XX = "5xx"
#: An error of the engine in an answer with status 200.
ENGINE_ERROR = "engine_error"
ABORTED = "aborted"
#: A reused connection died before a byte of the answer, and the request was sent again within the attempt.
RESENT = "resent"
RESULTS = (
    *(OK, CONNECT_ERROR, CONNECT_TIMEOUT, EXHAUSTED, TIMEOUT, CLOSED, PROTOCOL, STATUS_5XX, ENGINE_ERROR, ABORTED),
    RESENT,
)

# Reasons not to retry a failed attempt: the retry budget, a `reject` rule, or no room.
BUDGET = "budget"
NOT_RETRIED = (BUDGET, REJECTED, *NO_ROOM)

# Early ends of an answer that are no fault of the instance or of the request.
CLIENT_GONE = "client_gone"
CLIENT_STALLED = "client_stalled"
SHUTDOWN = "shutdown"

# States of instances (`smetric.fleet.instance.State`), and reasons of an ejection.
STATES = ("well", "warming", "ejected", "ill", "refusing", "stopping", "asleep", "draining")
PROBE = "probe"
CONNECT = "connect"
SLOW = "slow"
EJECTION_REASONS = (PROBE, CONNECT, CLOSED, PROTOCOL, TIMEOUT, STATUS_5XX, ENGINE_ERROR, SLOW)

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
TOKENIZE_RESULTS = ("ok", "late", "unsupported", "refused", "unavailable", "busy", "distrusted", "failed")

# Results of placements shared with other routers.
PLACEMENT_SENT = "sent"
PLACEMENT_DROPPED = "dropped"
PLACEMENT_RECEIVED = "received"
PLACEMENT_REFUSED = "refused"
PLACEMENT_RESULTS = (PLACEMENT_SENT, PLACEMENT_DROPPED, PLACEMENT_RECEIVED, PLACEMENT_REFUSED)

# Results of the lines of a record.
RECORD_WRITTEN = "written"
RECORD_DROPPED = "dropped"
RECORD_FAILED = "failed"
RECORD_RESULTS = (RECORD_WRITTEN, RECORD_DROPPED, RECORD_FAILED)


# Spans and their attributes. The `gen_ai.*` names are those of OpenTelemetry's GenAI conventions 0.1 (status:
# development), `http.*` and the like those of the stable HTTP conventions. No attribute is both a leaf and a prefix of
# another one: some tracing UIs turn dots into trees.

SPANS = {
    "{method} {route}": "SERVER: the request as the client sees it; starts at its arrival.",
    "hold": "INTERNAL: time in the queue before a decision.",
    "route {policy}": "INTERNAL: one decision; a second one follows when the first instance failed.",
    "shadow {policy}": "INTERNAL: what a policy in shadow would have decided in its place.",
    "{operation} {model}": "CLIENT: one attempt on one instance; its traceparent goes upstream.",
}

DECISION_ID = Attribute("smetric.decision.id", "ULID of the decision, also in a response header.")
OUTCOME = Attribute("smetric.decision.outcome", f"Outcome: {', '.join(OUTCOMES)}.")
REASON = Attribute("smetric.decision.reason", f"Reason: {', '.join(REASONS)}.")
DURATION = Attribute("smetric.decision.duration", "Time the policy took to evaluate.", "double", "s")
SUMMARY = Attribute("smetric.decision.summary", "The decision in one sentence.")
LOOKUP_DURATION = Attribute("smetric.lookup.duration", "Time spent on look-ups before the decision.", "double", "s")
HOLD_DURATION = Attribute(
    "smetric.hold.duration", "Time in the queue before the decision, by a rule or for want of a place.", "double", "s"
)
HOLD_REASON = Attribute("smetric.hold.reason", f"Reason of the wait: {', '.join(HOLD_REASONS)}; on the `hold` span.")
ORIGIN = Attribute("smetric.decision.origin", f"Origin of the decision: {', '.join(ORIGINS)}.")
ROUTE = Attribute("smetric.route", "Entry of `routes` that the request matched; `default` without one.")
ARM = Attribute("smetric.arm", "`control` or `canary`, where the route has a canary.")
SHADOW_POLICY = Attribute("smetric.shadow.policy", "The policies in shadow, separated by commas.")
SHADOW_INSTANCE = Attribute("smetric.shadow.instance.id", "The choice of each of them.")
SHADOW_AGREES = Attribute("smetric.shadow.agrees", "Whether all of them would have chosen the same.", "bool")
SHADOW_REGRET = Attribute(
    "smetric.shadow.regret", "How much worse they score the actual choice, 0..1; the largest.", "double"
)
SHADOW_DIVERGED = Attribute(
    "smetric.shadow.session_diverged", "One of them chose otherwise before in this conversation.", "bool"
)
POLICY_NAME = Attribute("smetric.policy.name", "Name of the acting policy.")
POLICY_HASH = Attribute("smetric.policy.hash", "First 12 hex digits of the SHA-256 of its source.")
POLICY_SOURCE = Attribute("smetric.policy.source", "Its file's name, without the folder.")
POLICY_GENERATION = Attribute("smetric.policy.generation", "1 for the policy loaded at start, +1 a change.", "int")
POLICY_ORIGIN = Attribute("smetric.policy.origin", "Reason why it acts: `start`, `file`, `rollback`, `guardrail`.")
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
    "smetric.migration.guard", f"Reason: a guard, a filter, `{LEFT_OUT}` (it was no candidate) or `{NOT_PICKED}`."
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
FILTERED = Attribute("smetric.candidate.filtered_count", "Number of candidates that its filters removed.", "int")
TIED = Attribute("smetric.candidate.tied_count", "Number of candidates with the best score.", "int")
FILTER_REASONS = Attribute(
    "smetric.candidate.filter_reasons", "Reasons why the others were no candidates, e.g. `draining=1 model=3`."
)
CANDIDATES_JSON = Attribute("smetric.candidates.json", "The foremost candidates as JSON rows, < 2 kB.")
SCORE_CHOSEN = Attribute("smetric.score.chosen", "Score of the chosen instance.", "double")
SCORE_RUNNER_UP = Attribute("smetric.score.runner_up", "Best score among the others.", "double")
SCORE_MARGIN = Attribute("smetric.score.margin", "Distance between these two.", "double")
SCORE_WORST = Attribute("smetric.score.worst", "Worst score.", "double")
SCORE_DIRECTION = Attribute("smetric.score.direction", "Winning end: `min` or `max`.")
PROMPT_TOKENS = Attribute("smetric.prompt.tokens", "Prompt length the policy saw.", "int", "tokens")
PROMPT_SOURCE = Attribute("smetric.prompt.tokens_source", "Source of that length: `exact` or `estimated`.")
HIT_TOKENS = Attribute("smetric.prefix.hit_tokens", "Prompt tokens believed cached there.", "int", "tokens")
HIT_RATIO = Attribute("smetric.prefix.hit_ratio", "The same as a share of the prompt.", "double")
HIT_SOURCE = Attribute(
    "smetric.prefix.source", "Source of that hit, with the tier if there are several: `prefix_index`, `lmcache:host`."
)
ACTUAL_HIT_TOKENS = Attribute(
    "smetric.prefix.actual_hit_tokens", "Cached prompt tokens, as the instance reports them.", "int", "tokens"
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
RESULT = Attribute("smetric.upstream.result", f"Result of the attempt: {', '.join(RESULTS)}.")
GAVE_UP = Attribute(
    "smetric.upstream.gave_up", f"On the request's own span: why no other instance was tried, {', '.join(NOT_RETRIED)}."
)

HTTP_METHOD = Attribute("http.request.method", "The method; `_OTHER` when it is not a known one.")
HTTP_ROUTE = Attribute("http.route", "The matched route template.")
HTTP_STATUS = Attribute("http.response.status_code", "The status answered.", "int")
HTTP_RESEND = Attribute("http.request.resend_count", "Attempts before this one.", "int")
URL_PATH = Attribute("url.path", "The path, bounded, without the query.")
URL_SCHEME = Attribute("url.scheme", "`http` or `https`.")
URL_FULL = Attribute("url.full", "Address of the attempt, without its query.")
SERVER_ADDRESS = Attribute("server.address", "Address the connection was made to.")
SERVER_PORT = Attribute("server.port", "Port the connection was made to.", "int")
CLIENT_ADDRESS = Attribute("client.address", "Address of the peer.")
PROTOCOL_VERSION = Attribute("network.protocol.version", "HTTP version: `1.1`, `2`.")
ERROR_TYPE = Attribute("error.type", "Error from a closed list, or the status.")

GEN_AI_OPERATION = Attribute(
    "gen_ai.operation.name", "`chat`, `text_completion`, else the path after `/v1/`: `embeddings`, `rerank`."
)
GEN_AI_PROVIDER = Attribute("gen_ai.provider.name", "`vllm`.")
GEN_AI_MODEL = Attribute("gen_ai.request.model", "The model asked for, bounded.")
GEN_AI_STREAM = Attribute("gen_ai.request.stream", "Whether the answer is streamed.", "bool")
GEN_AI_TTFC = Attribute(
    "gen_ai.response.time_to_first_chunk", "From sending the attempt to its first output.", "double", "s"
)
GEN_AI_FINISH = Attribute(
    "gen_ai.response.finish_reasons", "Reason why the instance ended its answer: `stop`, `length`, ….", "string[]"
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
