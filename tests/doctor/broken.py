"""Faults of a set-up, and the finding that each must cause."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from itertools import cycle
from typing import Any

from msgspec.structs import replace

from smetric.config.settings import PeersSettings, ScrapeSettings, TokenizerSettings
from smetric.doctor.site import FindingSeverity
from smetric.sources.vllm import MAX_PAGE_BYTES
from tests.doctor.lab import Lab

Break = Callable[[Lab], object]

ERROR, WARNING, INFO = FindingSeverity


def both(*breaks: Break) -> Break:
    return lambda lab: [each(lab) for each in breaks]


def on_first(path: str, old: bytes, new: bytes) -> Break:
    return lambda lab: lab.fronts[0].edit(path, old, new)


def with_settings(**fields: Any) -> Break:
    return lambda lab: lab.set(**fields)


def first_is(**fields: Any) -> Break:
    return lambda lab: lab.set(instances=(replace(lab.settings.instances[0], **fields), *lab.settings.instances[1:]))


def twice(lab: Lab) -> None:
    again = replace(lab.settings.instances[0], id="again")
    lab.set(instances=(*lab.settings.instances, again), params={"FLOOR": 2.0})


def lmcache_with(**fields: Any) -> Break:
    return lambda lab: lab.lmcache(**fields)


def lmcache_says(path: str, change: Callable[[Any], None], **fields: Any) -> Break:
    return both(lmcache_with(**fields), lambda lab: lab.store.edit_json(path, change))


def lmcache_refuses(path: str, status: int, **fields: Any) -> Break:
    return both(lmcache_with(**fields), lambda lab: lab.store.statuses.update({path: status}))


def lmcache_without_e1(lab: Lab) -> None:
    lab.lmcache()
    ids = {**lab.settings.lmcache.instances, "e1": "nobody"}
    lab.set(lmcache=replace(lab.settings.lmcache, instances=ids))


def refusing(path: str, status: int) -> Break:
    return lambda lab: lab.fronts[0].statuses.update({path: status})


def header(name: str, value: str) -> Break:
    return lambda lab: lab.fronts[0].headers.update({name: value})


def metrics_edited(edit: Callable[[bytes], bytes]) -> Break:
    return lambda lab: lab.fronts[0].edits.update({"/metrics": edit})


def metrics_matching(series: bytes, instead: bytes) -> Break:
    return metrics_edited(lambda page: re.sub(series, instead, page))


def metrics_with(more: bytes) -> Break:
    return metrics_edited(lambda page: page + more)


def two_engines_at_one_address(lab: Lab) -> None:
    turns = cycle((b"1e9", b"2e9"))
    metrics_edited(lambda page: re.sub(rb"(?m)^(process_start_time_seconds) .*", rb"\1 " + next(turns), page))(lab)


def no_details(number: int) -> Break:
    return lambda lab: lab.fronts[number].edit_json(
        "/v1/chat/completions", lambda answer: answer["usage"].update(prompt_tokens_details=None)
    )


def never_cached(lab: Lab) -> None:
    for front in lab.fronts:
        front.edit_json(
            "/v1/chat/completions", lambda answer: answer["usage"]["prompt_tokens_details"].update(cached_tokens=0)
        )


def old_heartbeat(answer: Any) -> None:
    answer["workers"][0].update(registration_time=time.time() - 1000, last_heartbeat_time=time.time() - 500)


def forget_all(answer: Any) -> None:
    for result in answer["results"]:
        result["placements"] = []


def hanging_metrics(lab: Lab) -> None:
    lab.fronts[0].hanging.add("/metrics")
    lab.set(scrape=ScrapeSettings(timeout=0.5))


def bad_version(lab: Lab) -> None:
    lab.fronts[0].edits["/version"] = lambda _: b"[" * 9_000


def other_template(lab: Lab) -> None:
    by_engine(lab)
    lab.fronts[1].edit_json("/tokenize", lambda answer: answer["tokens"].__setitem__(0, 7))


by_engine = with_settings(tokenizer=TokenizerSettings(source="engine"))

# fmt: off
#: Faults by name: the way to cause it, the check that finds it, its severity, and parts of its text and remedy.
BROKEN: dict[str, tuple[Break, str, FindingSeverity, str, str]] = {
    "an engine that is down":
        (first_is(url="http://127.0.0.1:9"), "instances", ERROR, "connection refused", "start the engine"),
    "an engine that is not well":
        (refusing("/health", 503), "instances", ERROR, "/health says 503", "start the engine"),
    "one engine under two names":
        (twice, "instances", ERROR, "same engine as instance e0", "take again out of `instances`"),
    "another version":
        (on_first("/version", b"0.32.0", b"0.9.1"), "versions", WARNING, "0.9.1 on e0",
         "run one version of vLLM everywhere"),
    "a clock that is wrong":
        (header("date", "Sun, 06 Nov 1994 08:49:37 GMT"), "versions", WARNING, "behind ours", "NTP"),
    "a clock with nonsense and a version that is no word":
        (both(header("date", "Mon, 01 Jan 99999999999 00:00:00 GMT"),
              bad_version), "versions", INFO, "its version is not at", "point `url` at"),
    "an alias for nothing":
        (with_settings(models={"gpt": "n"}), "models", ERROR, "n, which no instance serves",
         "set `models.gpt`"),
    "a configured model that is not served":
        (first_is(models=("n",)), "models", ERROR, "does not serve n; it serves m", "--served-model-name"),
    "models that are not listed":
        (refusing("/v1/models", 404), "models", ERROR, "not known: /v1/models says 404", "name its `models`"),
    "models that are configured and not listed":
        (both(refusing("/v1/models", 404), first_is(models=("m",))), "models", INFO, "not known: /v1/models says 404",
         "why the engine does not list them"),
    "another model of the same name":
        (on_first("/v1/models", b'"root":"m"', b'"root":"/models/other"'), "models", WARNING,
         "loaded from /models/other, m", "`--model`"),
    "metrics that are not known":
        (on_first("/metrics", b"vllm:num_requests", b"vllm:requests"), "metrics", ERROR,
         "not on its /metrics under known names", "update the router"),
    "metrics of something else":
        (on_first("/metrics", b"vllm:", b"sglang:"), "metrics", ERROR, "no metric", "point `url` at"),
    "metrics that hang":
        (hanging_metrics, "metrics", ERROR, "no answer in 0.5 s", "raise `scrape.timeout`"),
    "metrics that are compressed":
        (lambda lab: lab.fronts[0].compressed.add("/metrics"), "metrics", ERROR,
         "compressed, which was not asked for", "let no proxy"),
    "metrics that are more than the router reads":
        (metrics_with(b"#" * MAX_PAGE_BYTES), "metrics", ERROR, "the answer has more than", "point `url` at"),
    "metrics of very many engines":
        (metrics_with(b"".join(b'vllm:num_requests_running{engine="%d"} 0\n' % n for n in range(2100))), "metrics",
         ERROR, "more than 2048 series", "merge the pages"),
    "a load that is no number":
        (metrics_matching(rb"(?m)^(vllm:num_requests_running\S*) .*", rb"\1 NaN"), "metrics", ERROR,
         "1 of its metrics have impossible values", "may rewrite it"),
    "a usage that is no share":
        (metrics_matching(rb"(?m)^(vllm:kv_cache_usage_perc\S*) .*", rb"\1 40"), "metrics", WARNING,
         "1 of its metrics have impossible values", "may rewrite it"),
    "several engines at one address":
        (two_engines_at_one_address, "instances", ERROR, "several engines answer at http://", "an `url` that"),
    "prefix caching that is off":
        (on_first("/metrics", b'enable_prefix_caching="True"', b'enable_prefix_caching="False"'), "caches",
         ERROR, "prefix caching is off", "`--enable-prefix-caching`"),
    "a block size that is not the engines'":
        (with_settings(block_size=32), "caches", WARNING, "32 here; on the engines it is 16",
         "set `block_size: 16`"),
    "engines of two block sizes":
        (on_first("/metrics", b' block_size="16"'.strip(), b'block_size="32"'), "caches", WARNING,
         "16 on e1; 32 on e0", "the same `--block-size`"),
    "engines of two hash algorithms":
        (on_first("/metrics", b'hash_algo="xxh3"', b'hash_algo="sha256"'), "caches", WARNING,
         "sha256 on e0; xxh3 on e1", "`--prefix-caching-hash-algo`"),
    "no cached tokens in answers":
        (no_details(0), "hits", WARNING, "do not report cached tokens", "`--enable-prompt-tokens-details`"),
    "no cached tokens in the answers of another engine of the model":
        (no_details(1), "hits", WARNING, "do not report cached tokens", "`--enable-prompt-tokens-details`"),
    "hits that do not come":
        (never_cached, "hits", WARNING, "the engine reports 0", "clears or fills the cache"),
    "several routers that share nothing":
        (with_settings(replicas=4), "replicas", ERROR, "4 routers, each with a prefix index of its own",
         "set `peers.urls`"),
    "a peer that is down":
        (with_settings(peers=PeersSettings(urls=("http://127.0.0.1:9",))), "replicas", ERROR,
         "connection refused", "correct `peers.urls`"),
    "a policy that does not check":
        (with_settings(params={"OVERLOAD": 0.5}), "start", ERROR, "sets `OVERLOAD` to 0.5, outside 1..",
         "`smetric config check`"),
    "a certificate that is missing":
        (lambda lab: lab.set(listen=replace(lab.settings.listen, cert_file="/none.pem")), "start", ERROR,
         "cannot be used (no such file or directory)", "`smetric config check`"),
    "an admin port that is open to all":
        (lambda lab: lab.set(admin=replace(lab.settings.admin, host="0.0.0.0")), "start", ERROR,
         "the admin port listens on 0.0.0.0", "`smetric config check`"),
    "an engine with another chat template":
        (other_template,
         "tokens", WARNING, "other token ids than on e0", "`--chat-template`"),
    "an engine whose /tokenize is closed":
        (both(by_engine, refusing("/tokenize", 404)), "tokens", ERROR,
         "does not tokenise", "pass /tokenize on"),
    "something else before the engine":
        (header("server", "nginx"), "keep-alive", INFO, "nginx", "--slow"),
    "LMCache that is down":
        (lmcache_with(url="http://127.0.0.1:9"), "lmcache", ERROR, "connection refused", "`lmcache.url`"),
    "LMCache of the other kind":
        (lmcache_refuses("/controller/workers", 404, mode="controller"), "lmcache", ERROR,
         "but as its coordinator", "set `lmcache.mode: coordinator`"),
    "something else where LMCache is to be":
        (lmcache_says("/instances", lambda answer: answer.pop("instances")), "lmcache", ERROR,
         "does not answer as LMCache's coordinator, but as its controller", "set `lmcache.mode: controller`"),
    "LMCache with other chunks":
        (lmcache_with(chunk_size=128), "lmcache", ERROR, "chunks are not as configured",
         "set `lmcache.chunk_size`"),
    "LMCache that refuses look-ups":
        (lmcache_refuses("/directory/lookup", 401), "lmcache", ERROR, "cannot be asked: it answers look-ups with 401",
         "`lmcache.url`"),
    "LMCache with another model":
        (lmcache_with(models={"m": "n"}), "lmcache", ERROR, "of model m, not n",
         "set `lmcache.models: {m: m}`"),
    "LMCache for a model without an instance":
        (lmcache_with(models={"m": "m", "ghost": "n"}), "lmcache", ERROR,
         "it names ghost, which no instance serves; they serve m", "name the model as the instances do"),
    "LMCache for an alias":
        (both(lmcache_with(models={"alias": "m"}), with_settings(models={"alias": "m"})), "lmcache",
         ERROR, "it names alias, which no instance serves", "name m instead"),
    "LMCache with another world size":
        (lmcache_with(world_size=2), "lmcache", ERROR, "of world size 1, not 2",
         "set `lmcache.world_size: 1`"),
    "an instance that LMCache does not know":
        (lmcache_without_e1, "lmcache", ERROR, "knows no instance nobody; it knows 127.0.0.1:",
         "set `lmcache.instances: {e1: ID}`"),
    "LMCache that finds nothing":
        (lmcache_says("/directory/lookup", forget_all), "lmcache", WARNING, "is not found in LMCache",
         "`--coordinator-event-reporting`"),
    "LMCache's controller that finds nothing":
        (lmcache_says("/lookup", lambda answer: answer.update(layout_info={}), mode="controller"), "lmcache", WARNING,
         "is not found in LMCache", "the same `PYTHONHASHSEED`"),
    "an LMCache worker that is silent":
        (lmcache_says("/controller/workers", old_heartbeat, mode="controller"), "lmcache", WARNING,
         "last heartbeat was 500 s ago", "`--health-check-interval 10 --lmcache-worker-timeout 60`"),
}
# fmt: on
