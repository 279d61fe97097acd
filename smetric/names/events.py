"""Log events."""

from __future__ import annotations

#: By name, when a line of it is written.
EVENTS = {
    "request": "Info: one line per request, when it has ended.",
    "smetric.request.refused": (
        "Warning: a request is not HTTP as served here, or came too slowly, and was refused before it was read: "
        "`status`, `reason`, `client`. Ten a minute for each reason; `kept_back` counts the rest."
    ),
    "smetric.migration": (
        "Info: a later turn went elsewhere than where most of its prompt is, or than the last one: `from`, `to`, "
        "`rule`, `guard`, `left_tokens`. Once a minute for each `from`, rule and guard; `kept_back` counts the rest."
    ),
    "smetric.policy.reloaded": "Info: the policy file changed and its new policy acts.",
    "smetric.policy.kept": "Error: the policy file changed but cannot be used; the last good one stays.",
    "smetric.policy.restored": (
        "Warning: an operator restored an earlier generation of a policy. Error: the guardrail did, after a change."
    ),
    "smetric.guardrail.failed": (
        "Error: a policy out of its band could not be restored, or looking at them raised: a bug."
    ),
    "smetric.shadow.failed": (
        "Error: a policy in shadow raised: a bug. Once a minute for each; `kept_back` counts the rest."
    ),
    "smetric.files.looked_at": "Info: SIGHUP came, and policies and certificates are read again if they have changed.",
    "smetric.files.compared": (
        "Warning: the system does not tell of changed files, and why: policies or certificates are compared now and "
        "then."
    ),
    "smetric.files.failed": (
        "Error: looking at policies, certificates or drains for changes raised: a bug; it goes on. Once a minute for "
        "each; `kept_back` counts the rest."
    ),
    "smetric.policy.failed": "Error: the policy raised while it was evaluated: a bug.",
    "smetric.instance.restarted": (
        "Warning: a new process answers; what was known of its cache is forgotten. Where it repeats, several engines "
        "answer at one `url`. At most ten a minute of one instance; `kept_back` counts the rest."
    ),
    "smetric.instance.changed": "Warning or info: an instance stands otherwise than before: its `state`.",
    "smetric.drains.drained": "Warning: an operator drains an instance; requests under way there.",
    "smetric.drains.undrained": "Info: an operator lets an instance be a candidate again.",
    "smetric.drains.restored": "Info: at start, the instances drained before it.",
    "smetric.drains.unreadable": "Warning: the file of drained instances cannot be read.",
    "smetric.drains.not_kept": "Warning: the file of drained instances cannot be written.",
    "smetric.probe.crashed": "Error: probing an instance raised: a bug; it goes on.",
    "smetric.scrape.changed": (
        "Warning: scrapes of an instance began to end otherwise than before; at most ten a minute of one instance."
    ),
    "smetric.scrape.crashed": "Error: scraping an instance raised: a bug; it goes on.",
    "smetric.models.unreadable": "Warning: an instance's model list cannot be read; the old one stays.",
    "smetric.index.restored": (
        "Info: what a file or a peer knew of an instance was taken in, or was of another process."
    ),
    "smetric.index.cleared": (
        "Warning: an instance reported no hits where there were some: its cache counts as cleared."
    ),
    "smetric.index.unreadable": "Warning: the index's file cannot be read; it starts empty.",
    "smetric.index.not_saved": "Warning: the index's file cannot be written.",
    "smetric.index.failed": "Error: writing the index's file raised: a bug; it goes on.",
    "smetric.hits.disagree": (
        "Warning: for a minute and 50 answers a source's predicted hits for an instance were wrong by more than a "
        "fifth of the prompts; `smetric doctor` says why."
    ),
    "smetric.hits.agree": "Info: they are wrong by less than a tenth again.",
    "smetric.peer.changed": (
        "Warning: a peer began to take placements, or to fail otherwise. Ten a minute of each; `kept_back` counts more."
    ),
    "smetric.peer.no_image": "Info or warning: a peer did not say what it knows.",
    "smetric.peer.own": (
        "Info: this router itself answers at a peer's address: nothing is sent there any more. Warning: another one "
        "did before; a balancer hides who is behind it: name each router itself."
    ),
    "smetric.peer.silent": "Warning: another router has not been heard for three heartbeats; what it places is missed.",
    "smetric.peer.unheard": (
        "Warning: more peers take placements (`taking`) than tell theirs (`heard`). Name this router in all "
        "`peers.urls`; let them reach its admin port."
    ),
    "smetric.peer.refused": (
        "Warning: a peer sends to what is not known here; `problem`: `instance`, none has the id `instance`: give them "
        "the same ids on all routers; `blocks`, of token ids, are not cut so here: set the same `block_size` and "
        "`tokenizer.source`. Once a minute for each; `kept_back` counts the rest."
    ),
    "smetric.peer.failed": "Error: sharing placements raised and has ended: a bug.",
    "smetric.lookup.suspended": (
        "Warning: a lookup service failed several times in a row; it is left alone for a while."
    ),
    "smetric.lookup.resumed": "Info: a lookup service that was left alone answers again.",
    "smetric.source.failed": "Error: a source raised: a bug. Once a minute for each; `kept_back` counts the rest.",
    "smetric.tokenize.unavailable": (
        "Warning: an instance failed to tokenise for a model several times; it is not asked for a while."
    ),
    "smetric.tokenize.distrusted": (
        "Warning: the ids of a model were not as many as its engine counted, several times; none are used for a minute."
    ),
    "smetric.tokenize.whole": "Warning: a tokenizer cannot be remembered in segments; every prompt is encoded whole.",
    "smetric.tokenize.failed": "Error: tokenising raised: a bug; the ids stay unknown.",
    "smetric.kv_events.changed": (
        "Info: an instance's cache contents became known from its events. Warning: they no longer are, and why: "
        "`joined_late`, `behind`, `gap`, `malformed`, `other_topic`, `unknown_block`, `unsupported`."
    ),
    "smetric.kv_events.restarted": (
        "Warning: an engine's numbering began anew: a new process, whose cache is empty. Where it repeats, several "
        "engines publish at one address. Ten a minute for each; `kept_back` counts the rest, also of "
        "`smetric.kv_events.changed`."
    ),
    "smetric.kv_events.no_replay": (
        "Warning: what was missed cannot be had and stays unknown, and the `problem` of the engine's replay socket: "
        "`TimeoutError`, it does not answer or does not end; `MessageError`, it answers what cannot be read; "
        "`OtherTopic`, it publishes under a topic that does not begin with `kv_events.topic`: set that to what it does "
        "begin with."
    ),
    "smetric.kv_events.failed": "Error: an address cannot be used; it is tried again.",
    "smetric.kv_events.crashed": "Error: reading events raised: a bug; it begins again.",
    "smetric.serving": "Info: both ports are open.",
    "smetric.request.failed": "Error: an endpoint raised, and the client was answered 500: a bug.",
    "smetric.admin.refused": (
        "Warning: somebody asked the admin port without its token, or a web page did; at most ten a minute of one "
        "address."
    ),
    "smetric.admin.changed": "Info: an operator changed something over the admin port.",
    "smetric.credential.kept": (
        "Warning: a secret's file changed but cannot be read; the secret it held before is used."
    ),
    "smetric.instance.odd_address": (
        "Warning: an instance's name leads to addresses where none can be; none is used. Once a minute; `kept_back` "
        "counts the rest."
    ),
    "smetric.stop.failed": "Error: a part of the router raised when it was to end: a bug.",
    "smetric.record.not_written": (
        "Error: a record cannot be written; once, until it can be again, and ten times a minute at most."
    ),
    "smetric.record.failed": "Error: a line could not be made: a bug. Once a minute; `kept_back` counts the rest.",
    "smetric.listener.failed": (
        "Error: a `listener` that records requests raised: a bug, or an access line that cannot be written. It costs "
        "that record, never the request. Once a minute for each listener; `kept_back` counts the rest."
    ),
    "smetric.record.resumed": "Info: a record that could not be written is written again.",
    "smetric.ready": "Info: requests are served.",
    "smetric.draining": "Info: told to end; requests under way are finished.",
    "smetric.live.failed": "Error: what the live page shows could not be made: a bug.",
    "smetric.overload.changed": (
        "Warning or info: the router came to be short of a resource (`lag`, `memory`, `files`), or no longer is: its "
        "`state` is `soft`, `hard` or `calm`."
    ),
    "smetric.connections.full": "Warning: the connection cap is reached; so many clients were turned away.",
    "smetric.tls.reloaded": "Info: the data port's certificate changed; who comes now is shown it.",
    "smetric.tls.kept": "Error: its files changed but cannot be used, and why; the certificate read before stays.",
    "smetric.connection.failed": "Error: serving a connection raised: a bug.",
    "smetric.cut_off": "Warning: the drain deadline has come; so many requests, maybe none, were cut off.",
    "smetric.supervisor.not_told": "Warning: the supervisor that asks to be told cannot be reached.",
    "smetric.stopped": "Info: everything has ended.",
    "smetric.tracing": "Info: at start, whether traces are exported and where to.",
    "smetric.tracing.lost": (
        "Warning: a batch of `spans` could not be delivered, with the last `problem`, such as a status. Once a minute; "
        "`kept_back` counts the rest."
    ),
    "smetric.tracing.rejected": (
        "Warning: the collector took an export but rejected so many of its `spans`, maybe none, and says why "
        "(`problem`). Once a minute; `kept_back` counts the rest."
    ),
    "smetric.doctor.failed": "Critical: a check of `smetric doctor` raised: a bug.",
    "library": "A record of a library's own logger, or its warning; at most one a minute for each message.",
}
