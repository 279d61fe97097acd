"""Log events."""

from __future__ import annotations

#: Level and meaning by event name. Lines about one failure are limited to one a minute where they may repeat.
EVENTS = {
    "request": "Info: the end of a request; one line each.",
    "smetric.request.refused": (
        "Warning: a request was refused before it was read, as it is malformed or came too slowly: `status`, `reason`,"
        " `client`. At most ten a minute for each reason."
    ),
    "smetric.migration": (
        "Info: a later turn left the instance with most of its prompt, or that of the last turn: `from`, `to`, `rule`,"
        " `guard`, `left_tokens`. Once a minute for each `from`, rule and guard."
    ),
    "smetric.policy.reloaded": "Info: a policy file changed and its new policy acts.",
    "smetric.policy.kept": "Error: a policy file changed but cannot be used; the last good policy stays.",
    "smetric.policy.restored": (
        "Warning: an operator restored an earlier generation of a policy. Error: the guardrail did, after a change."
    ),
    "smetric.policy.refuses_all": (
        "Error: for ten seconds a policy has refused every request, by the rule named. Once until it routes again."
    ),
    "smetric.policy.no_load_floor": (
        "Info: at start, the fleet has 3 to 8 instances and the policy's `FLOOR` is 0: while the other instances are "
        "idle, one running request counts as overload and sends a session away from its cache. Set `FLOOR: 2`."
    ),
    "smetric.guardrail.failed": (
        "Error: a policy out of its band could not be restored, or the check of the bands raised: a bug."
    ),
    "smetric.shadow.failed": "Error: a policy in shadow raised: a bug. Once a minute for each policy.",
    "smetric.files.looked_at": "Info: on SIGHUP, policies and certificates that have changed are read again.",
    "smetric.files.compared": (
        "Warning: the system reports no changes of files, and why; policies or certificates are compared periodically."
    ),
    "smetric.files.failed": (
        "Error: the check of policies, certificates or drains for changes raised: a bug. It continues. Once a minute "
        "for each."
    ),
    "smetric.policy.failed": "Error: a policy raised during its evaluation: a bug.",
    "smetric.instance.restarted": (
        "Warning: a new process answers; the knowledge of its cache is discarded. Repeated lines mean that several "
        "engines answer at one `url`. At most ten a minute for each instance."
    ),
    "smetric.instance.changed": "Warning or info: the `state` of an instance has changed.",
    "smetric.drains.drained": "Warning: an operator drains an instance that has so many `requests` in progress.",
    "smetric.drains.undrained": "Info: an operator makes an instance a candidate again.",
    "smetric.drains.restored": "Info: at start, the instances that were drained before.",
    "smetric.drains.unreadable": "Warning: the file of drained instances cannot be read.",
    "smetric.drains.not_kept": "Warning: the file of drained instances cannot be written.",
    "smetric.probe.crashed": "Error: a probe of an instance raised: a bug. Probing continues.",
    "smetric.scrape.changed": (
        "Warning: the result of scrapes of an instance has changed. At most ten a minute for each instance."
    ),
    "smetric.scrape.crashed": "Error: a scrape of an instance raised: a bug. Scraping continues.",
    "smetric.models.unreadable": "Warning: the model list of an instance cannot be read; the old list stays.",
    "smetric.index.restored": (
        "Info: the placements of a file or a peer for an instance were taken, or discarded as another process's."
    ),
    "smetric.index.cleared": (
        "Warning: an instance reported no hits where some were expected: its cache counts as cleared."
    ),
    "smetric.index.unreadable": "Warning: the file of the prefix index cannot be read; the index starts empty.",
    "smetric.index.not_saved": "Warning: the file of the prefix index cannot be written.",
    "smetric.index.failed": "Error: writing the file of the prefix index raised: a bug. It continues.",
    "smetric.hits.disagree": (
        "Warning: over at least a minute and 50 answers, a source's predicted hits for an instance were wrong by more "
        "than a fifth of the prompts; `smetric doctor` says why."
    ),
    "smetric.hits.agree": "Info: these predictions are wrong by less than a tenth again.",
    "smetric.peer.changed": (
        "Warning: a peer began to accept placements, or fails differently. At most ten a minute for each peer."
    ),
    "smetric.peer.no_image": "Info or warning: a peer sent no image of its index.",
    "smetric.peer.own": (
        "Info: this router itself answers at the address of a peer; it sends nothing there. Warning: another router "
        "did before, so a load balancer stands before them: name each router itself."
    ),
    "smetric.peer.silent": "Warning: another router has missed three heartbeats; its placements are not received.",
    "smetric.peer.unheard": (
        "Warning: more peers accept placements (`taking`) than send theirs (`heard`). Name this router in the "
        "`peers.urls` of all, and let them reach its admin port."
    ),
    "smetric.peer.refused": (
        "Warning: a peer sends placements of an unknown `instance` (`problem`: `instance`; use the same ids on all "
        "routers), or of blocks of token ids that are cut differently here (`problem`: `blocks`; set the same "
        "`block_size` and `tokenizer.source`). Once a minute for each."
    ),
    "smetric.peer.failed": "Error: sharing placements raised and has ended: a bug.",
    "smetric.lookup.suspended": (
        "Warning: a look-up service failed several times in a row and is suspended for a while."
    ),
    "smetric.lookup.resumed": "Info: a suspended look-up service answers again.",
    "smetric.source.failed": "Error: a source raised: a bug. Once a minute for each source.",
    "smetric.tokenize.unavailable": (
        "Warning: an instance failed to tokenise for a model several times; it is not asked for a while."
    ),
    "smetric.tokenize.distrusted": (
        "Warning: several times the engine of a model counted another number of tokens than there were ids; its ids "
        "are ignored for a minute."
    ),
    "smetric.tokenize.late": (
        "Warning: the token ids of a prompt came after its decision, for which they were unknown; `in_a_row` counts "
        "those of the model. If `is_useless`, its tokenizer never answers in time: raise `lookup`'s deadlines, or name "
        "the model's folder in `tokenizer.folders`. Once a minute for each model."
    ),
    "smetric.tokenize.local": "Info: `auto` found a model's tokenizer in the hub's local cache, and uses it.",
    "smetric.tokenize.by_engines": (
        "Warning: `auto` asks the engines of a model for token ids, and why. They often answer later than a decision "
        "waits: name the model's folder in `tokenizer.folders`, and install the extra `tokenizers`."
    ),
    "smetric.tokenize.whole": (
        "Warning: a tokenizer does not allow prompts to be cached in segments; every prompt is encoded whole."
    ),
    "smetric.tokenize.failed": "Error: tokenising raised: a bug. The ids stay unknown.",
    "smetric.kv_events.changed": (
        "Info: the contents of an instance's cache became known from its events. Warning: they became unknown, and "
        "why: `joined_late`, `behind`, `gap`, `malformed`, `other_topic`, `unknown_block`, `unsupported`."
    ),
    "smetric.kv_events.restarted": (
        "Warning: an engine's numbering began anew: a new process with an empty cache. Repeated lines mean that "
        "several engines publish at one address. At most ten a minute for each, `smetric.kv_events.changed` included."
    ),
    "smetric.kv_events.no_replay": (
        "Warning: missed messages cannot be recovered, and the `problem` of the engine's replay socket: "
        "`TimeoutError`, it does not answer or does not end; `MessageError`, its answer cannot be read; `OtherTopic`, "
        "it publishes under a topic that does not begin with `kv_events.topic`: set that to the prefix of its topic."
    ),
    "smetric.kv_events.failed": "Error: an address cannot be used; it is tried again.",
    "smetric.kv_events.crashed": "Error: reading events raised: a bug. It begins again.",
    "smetric.serving": "Info: both ports are open.",
    "smetric.request.failed": "Error: an endpoint raised, and the client was answered 500: a bug.",
    "smetric.admin.refused": (
        "Warning: the admin port was asked without its token, or by a web page. At most ten a minute for each address."
    ),
    "smetric.admin.changed": "Info: an operator changed something over the admin port.",
    "smetric.credential.kept": "Warning: the file of a secret changed but cannot be read; the old secret stays.",
    "smetric.instance.odd_address": (
        "Warning: an instance's name resolves to addresses where no instance can be; none is used. Once a minute."
    ),
    "smetric.stop.failed": "Error: a part of the router raised while it stopped: a bug.",
    "smetric.record.not_written": (
        "Error: a record cannot be written; one line until it can be again, and at most ten a minute."
    ),
    "smetric.record.failed": "Error: a line of a record could not be made: a bug. Once a minute.",
    "smetric.listener.failed": (
        "Error: a `listener` of exchanges raised: a bug. The request goes on without its record. Once a minute for "
        "each listener."
    ),
    "smetric.record.resumed": "Info: a record that could not be written is written again.",
    "smetric.ready": "Info: requests are served.",
    "smetric.draining": "Info: the router shuts down; requests in progress are finished.",
    "smetric.sample.failed": "Error: a sample of the features that need no look-up could not be taken: a bug.",
    "smetric.live.failed": "Error: the data of the live page could not be made: a bug.",
    "smetric.overload.changed": (
        "Warning or info: the shortage of a resource (`lag`, `memory`, `files`) has changed to the `state` `soft`, "
        "`hard` or `calm`."
    ),
    "smetric.connections.full": "Warning: the connection limit is reached; so many clients were refused.",
    "smetric.tls.reloaded": "Info: the data port's certificate changed; new connections use it.",
    "smetric.tls.kept": (
        "Error: the certificate's files changed but cannot be used, and why; the old certificate stays."
    ),
    "smetric.connection.failed": "Error: serving a connection raised: a bug.",
    "smetric.cut_off": "Warning: the drain deadline has passed; so many requests, maybe none, were cut off.",
    "smetric.supervisor.unreachable": "Warning: the service manager that asks for notifications cannot be reached.",
    "smetric.stopped": "Info: everything has ended.",
    "smetric.tracing": "Info: at start, whether traces are exported and where to.",
    "smetric.tracing.lost": (
        "Warning: a batch of `spans` could not be delivered, with the last `problem`, such as a status. Once a minute;"
        " `kept_back` counts the rest."
    ),
    "smetric.tracing.rejected": (
        "Warning: the collector accepted an export but rejected this number of its `spans`, maybe 0; `problem` is "
        "the collector's reason. Once a minute."
    ),
    "smetric.doctor.failed": "Critical: a check of `smetric doctor` raised: a bug.",
    "library": "A record of another library's logger, or a warning of Python; once a minute for each message.",
}
