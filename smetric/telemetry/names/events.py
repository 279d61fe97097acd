"""The events of the log."""

from __future__ import annotations

from smetric.telemetry.names.kind import Event

REQUEST_EVENT = Event("request", "Info: one line per request, when it has ended.")
REQUEST_REFUSED_EVENT = Event(
    "smetric.request.refused",
    "Warning: a request is not HTTP as served here, or came too slowly, and was refused before it was read: `status`, "
    "`reason`, `client`. Ten a minute for each reason; `kept_back` counts the rest.",
)
MIGRATION_EVENT = Event(
    "smetric.migration",
    "Info: a later turn went elsewhere than where most of its prompt is, or than the last one: `from`, `to`, `rule`, "
    "`guard`, `left_tokens`. Once a minute for each `from`, rule and guard; `kept_back` counts the rest.",
)
RELOADED_EVENT = Event("smetric.policy.reloaded", "Info: the policy file changed and its new policy acts.")
KEPT_EVENT = Event("smetric.policy.kept", "Error: the policy file changed but cannot be used; the last good one stays.")
RESTORED_EVENT = Event(
    "smetric.policy.restored",
    "Warning: an operator restored an earlier generation of a policy. Error: the guardrail did, after a change.",
)
GUARDRAIL_FAILED_EVENT = Event(
    "smetric.guardrail.failed",
    "Error: a policy out of its band could not be restored, or looking at them raised: a bug.",
)
SHADOW_FAILED_EVENT = Event(
    "smetric.shadow.failed",
    "Error: a policy in shadow raised: a bug. Once a minute for each; `kept_back` counts the rest.",
)
LOOKED_AT_EVENT = Event(
    "smetric.files.looked_at", "Info: SIGHUP came, and policies and certificates are read again if they have changed."
)
COMPARED_EVENT = Event(
    "smetric.files.compared",
    "Warning: the system does not tell of changed files, and why: policies or certificates are compared now and then.",
)
FAILED_EVENT = Event("smetric.policy.failed", "Error: the policy raised while it was evaluated: a bug.")
RESTARTED_EVENT = Event(
    "smetric.instance.restarted",
    "Warning: a new process answers; what was known of its cache is forgotten. Where it repeats, several engines "
    "answer at one `url`. At most ten a minute of one instance; `kept_back` counts the rest.",
)
CHANGED_EVENT = Event(
    "smetric.instance.changed", "Warning or info: an instance stands otherwise than before: its `state`."
)
DRAINED_EVENT = Event("smetric.drains.drained", "Warning: an operator drains an instance; requests under way there.")
UNDRAINED_EVENT = Event("smetric.drains.undrained", "Info: an operator lets an instance be a candidate again.")
DRAINS_RESTORED_EVENT = Event("smetric.drains.restored", "Info: at start, the instances drained before it.")
DRAINS_UNREADABLE_EVENT = Event("smetric.drains.unreadable", "Warning: the file of drained instances cannot be read.")
DRAINS_NOT_KEPT_EVENT = Event("smetric.drains.not_kept", "Warning: the file of drained instances cannot be written.")
PROBE_CRASHED_EVENT = Event("smetric.probe.crashed", "Error: probing an instance raised: a bug; it goes on.")
SCRAPE_EVENT = Event(
    "smetric.scrape.changed",
    "Warning: scrapes of an instance began to end otherwise than before; at most ten a minute of one instance.",
)
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
PEER_CHANGED_EVENT = Event(
    "smetric.peer.changed",
    "Warning: a peer began to take placements, or to fail otherwise. Ten a minute of each; `kept_back` counts more.",
)
PEER_NO_IMAGE_EVENT = Event("smetric.peer.no_image", "Info or warning: a peer did not say what it knows.")
PEER_OWN_EVENT = Event(
    "smetric.peer.own",
    "Info: this router itself answers at a peer's address: nothing is sent there any more. Warning: another one did "
    "before; a balancer hides who is behind it: name each router itself.",
)
PEER_SILENT_EVENT = Event(
    "smetric.peer.silent", "Warning: another router has not been heard for three heartbeats; what it places is missed."
)
PEER_UNHEARD_EVENT = Event(
    "smetric.peer.unheard",
    "Warning: more peers take placements (`taking`) than tell theirs (`heard`). Name this router in all `peers.urls`; "
    "let them reach its admin port.",
)
PEER_REFUSED_EVENT = Event(
    "smetric.peer.refused",
    "Warning: a peer sends to what is not known here; `problem`: `instance`, none has the id `instance`: give them the "
    "same ids on all routers; `blocks`, of token ids, are not cut so here: set the same `block_size` and "
    "`tokenizer.source`. Once a minute for each; `kept_back` counts the rest.",
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
    "Warning: an instance failed to tokenise for a model several times; it is not asked for a while.",
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
    "`joined_late`, `behind`, `gap`, `malformed`, `other_topic`, `unknown_block`, `unsupported`.",
)
KV_RESTARTED_EVENT = Event(
    "smetric.kv_events.restarted",
    "Warning: an engine's numbering began anew: a new process, whose cache is empty. Where it repeats, several engines "
    "publish at one address. Ten a minute for each; `kept_back` counts the rest, also of `smetric.kv_events.changed`.",
)
KV_NO_REPLAY_EVENT = Event(
    "smetric.kv_events.no_replay",
    "Warning: what was missed cannot be had and stays unknown, and the `problem` of the engine's replay socket: "
    "`TimeoutError`, it does not answer or does not end; `MessageError`, it answers what cannot be read; `OtherTopic`, "
    "it publishes under a topic that does not begin with `kv_events.topic`: set that to what it does begin with.",
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
    "smetric.instance.odd_address",
    "Warning: an instance's name leads to addresses where none can be; none is used. Once a minute; `kept_back` counts "
    "the rest.",
)
STOP_FAILED_EVENT = Event("smetric.stop.failed", "Error: a part of the router raised when it was to end: a bug.")
RECORD_NOT_WRITTEN_EVENT = Event(
    "smetric.record.not_written",
    "Error: a record cannot be written; once, until it can be again, and ten times a minute at most.",
)
RECORD_FAILED_EVENT = Event(
    "smetric.record.failed", "Error: a line could not be made: a bug. Once a minute; `kept_back` counts the rest."
)
RECORD_RESUMED_EVENT = Event("smetric.record.resumed", "Info: a record that could not be written is written again.")
READY_EVENT = Event("smetric.ready", "Info: requests are served.")
DRAINING_EVENT = Event("smetric.draining", "Info: told to end; requests under way are finished.")
LIVE_FAILED_EVENT = Event("smetric.live.failed", "Error: what the live page shows could not be made: a bug.")
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
TLS_RELOADED_EVENT = Event(
    "smetric.tls.reloaded", "Info: the data port's certificate changed; who comes now is shown it."
)
TLS_KEPT_EVENT = Event(
    "smetric.tls.kept", "Error: its files changed but cannot be used, and why; the certificate read before stays."
)
CONNECTION_FAILED_EVENT = Event("smetric.connection.failed", "Error: serving a connection raised: a bug.")
CUT_OFF_EVENT = Event(
    "smetric.cut_off", "Warning: the drain deadline has come; so many requests, maybe none, were cut off."
)
NOT_TOLD_EVENT = Event("smetric.supervisor.not_told", "Warning: the supervisor that asks to be told cannot be reached.")
STOPPED_EVENT = Event("smetric.stopped", "Info: everything has ended.")
TRACING_EVENT = Event("smetric.tracing", "Info: at start, whether traces are exported and where to.")
SPANS_REJECTED_EVENT = Event(
    "smetric.tracing.rejected",
    "Warning: the collector took an export but rejected so many of its `spans`, maybe none, and says why (`problem`). "
    "Once a minute; `kept_back` counts the rest.",
)
DOCTOR_EVENT = Event("smetric.doctor.failed", "Critical: a check of `smetric doctor` raised: a bug.")
LIBRARY_EVENT = Event(
    "library", "A record of a library's own logger, or its warning; at most one a minute for each message."
)
