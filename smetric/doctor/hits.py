"""The proof: a fresh prompt twice to one instance; what the sources predict is what the engine reports."""

from __future__ import annotations

import asyncio

from smetric.doctor.check import Skipped
from smetric.doctor.engine import Engine
from smetric.doctor.finding import Finding, error, info, shown, warning
from smetric.doctor.probe import FEW_CHARACTERS, Prediction, Probe, ProbeFailed, predict, send, send_new
from smetric.doctor.site import Site
from smetric.fleet.instance import Instance
from smetric.reading.prompt import BLOCK_BYTES
from smetric.request import InferenceRequest
from smetric.sources.lookups import LookupDeadline
from smetric.sources.prefix_index import PrefixIndex
from smetric.sources.prefix_part import PrefixPart
from smetric.sources.prefix_tokens import PrefixTokens
from smetric.usage import Usage

#: Seconds within which what an instance has just computed must be known to hold.
KNOWN_WITHIN_S = 3.0
_PAUSE_S = 0.1


async def hits(site: Site) -> list[Finding]:
    """Predicted hits are reported hits, for one instance of each model; the others report hits, too."""
    if not site.may_probe:
        raise Skipped("no probe was wanted")
    each = site.first_of_each_model()
    if not each:
        raise Skipped("no instance tells what it serves")
    proved = [engine for _, engine in each]
    others = [engine for engine in site.reachable if engine.models and engine not in proved]
    found = await asyncio.gather(
        *(_of_model(site, model, engine) for model, engine in each), *(_of_other(site, engine) for engine in others)
    )
    return [one for findings in found for one in findings]


async def _of_model(site: Site, model: str, engine: Engine) -> list[Finding]:
    instance = site.router.fleet[engine.settings.id]
    try:
        probe, usage = await send_new(site, engine, model)
        request = probe.request(site)
        ids = await site.router.token_ids.of(request)
        count = len(ids) if ids is not None else None
        if engine.page.cache.get("enable_prefix_caching") == "False":
            return _counted(engine, model, count, usage)
        _learn(site, request, instance, usage)
        prediction = await _once_known(site, probe, instance)
        again = await send(site, engine, probe)
    except ProbeFailed as problem:
        return [_refused(engine, model, problem)]
    # By wrong ids a wrong hit is predicted: what is to be mended are the ids.
    counted = _counted(engine, model, count, again)
    return counted or _judged(site, engine, model, prediction, again)


async def _of_other(site: Site, engine: Engine) -> list[Finding]:
    try:
        probe, usage = await send_new(site, engine, engine.models[0], FEW_CHARACTERS)
        if usage.cached_tokens is None:
            # Older engines do not report that nothing was cached.
            usage = await send(site, engine, probe)
    except ProbeFailed as problem:
        return [_refused(engine, engine.models[0], problem)]
    return [_unreported(engine)] if usage.cached_tokens is None else []


def _refused(engine: Engine, model: str, problem: ProbeFailed) -> Finding:
    return error(
        engine.where,
        f"it does not answer a small request for {shown(model)}: {problem}",
        "neither will it answer those of clients",
        "see the engine's log; send it a request by hand",
    )


def _unreported(engine: Engine) -> Finding:
    return warning(
        engine.where,
        "its answers do not report cached tokens",
        "predicted hits cannot be checked against real ones, and the index cannot learn from them",
        "start it with `--enable-prompt-tokens-details`",
    )


def _learn(site: Site, request: InferenceRequest, instance: Instance, usage: Usage) -> None:
    """Tell the sources what a router would: *instance* has answered *request*."""
    if request.prompt is not None and usage.prompt_tokens:
        site.router.tokens.learn(request.model, request.prompt.size, usage.prompt_tokens)
    site.router.router.prefilled(request, instance)
    site.router.router.settled(request, instance, usage)


async def _once_known(site: Site, probe: Probe, instance: Instance) -> Prediction:
    """What is predicted as soon as anything is; the last prediction if nothing ever is."""
    deadline = asyncio.get_running_loop().time() + KNOWN_WITHIN_S
    while True:
        prediction = await predict(site, probe.request(site), instance)
        if prediction.tokens or asyncio.get_running_loop().time() >= deadline:
            return prediction
        await asyncio.sleep(_PAUSE_S)


def _counted(engine: Engine, model: str, ids: int | None, usage: Usage) -> list[Finding]:
    if ids is None or usage.prompt_tokens in (None, ids):
        return []
    return [
        error(
            engine.where,
            f"a prompt has {ids} token ids here, and the engine counts {usage.prompt_tokens}",
            "every look-up by token ids (KV events, LMCache, the prefix index) finds nothing, or the wrong thing",
            f"let `tokenizer.folders` name the very model that {shown(model)} is, with its chat template, or set "
            "`tokenizer.source: engine`",
        )
    ]


def _judged(site: Site, engine: Engine, model: str, prediction: Prediction, usage: Usage) -> list[Finding]:
    actual = usage.cached_tokens
    if actual is None:
        return [_unreported(engine)]
    if prediction.tokens is None:
        return [
            warning(
                engine.where,
                f"no source knows what it holds, just after it computed a prompt; it reports {actual} cached tokens",
                "sessions cannot be sent where their cache is",
                "turn on `prefix_index.enabled`, and see the other findings on `kv_events` and `lmcache`",
            )
        ]
    room = _room(site, engine, model, prediction.source)
    if abs(prediction.tokens - actual) <= room:
        return _slow(site, engine, prediction, usage)
    return [
        warning(
            engine.where,
            f"{prediction.source} predicts {prediction.tokens:.0f} cached tokens, and the engine reports {actual}",
            f"they differ by more than a block ({room:.0f} tokens): sessions are sent where their cache is not, or "
            "leave where it is",
            "see the other findings; if there are none, something clears or fills the cache beside the router",
        )
    ]


def _slow(site: Site, engine: Engine, prediction: Prediction, usage: Usage) -> list[Finding]:
    lookup = site.settings.lookup
    waits = LookupDeadline(lookup.deadline_base, lookup.deadline_per_1k_tokens, lookup.deadline_cap)
    allowed = waits.of(usage.prompt_tokens or 1)
    if prediction.took_s <= allowed:
        return []
    return [
        info(
            engine.where,
            f"looking a prompt up took {prediction.took_s * 1000:.0f} ms; a decision waits {allowed * 1000:.0f} ms",
            "what is late is unknown",
            "if it stays so, raise `lookup.deadline_base`, or set `tokenizer.source: local`",
        )
    ]


def _room(site: Site, engine: Engine, model: str, source: str) -> float:
    """Tokens by which a prediction may be wrong: a block of the source's, and of the engine's."""
    block = engine.block_size or site.settings.block_size
    if source in (PrefixIndex.name, PrefixPart.name):
        return block + BLOCK_BYTES / site.router.tokens.of(model)
    if source == PrefixTokens.name:
        return max(block, site.settings.block_size)
    return block + (site.settings.lmcache.chunk_size if source.startswith("lmcache:") else 0)
