"""The closed lists of values that attributes and labels take."""

from __future__ import annotations

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
