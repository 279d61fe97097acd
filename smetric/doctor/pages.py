"""Check of the instances' /metrics: load is there, in time, under names that are known."""

from __future__ import annotations

from smetric.doctor.check import Skipped
from smetric.doctor.finding import Finding, error, info, warning
from smetric.doctor.site import Site
from smetric.sources.vllm_page import MAX_SERIES


async def metrics(site: Site) -> list[Finding]:
    """Load is on every instance's page, under names that are known."""
    if not site.reachable:
        raise Skipped("no instance answers")
    found: list[Finding] = []
    for engine in site.reachable:
        page, where = engine.page, engine.where
        blind = "its load is only what this router itself sent there"
        if engine.page_problem:
            found.append(
                error(
                    where,
                    f"its /metrics cannot be read: {engine.page_problem}",
                    blind,
                    "point `url` at the vLLM server itself, and let nothing before it hide, change or compress the "
                    "page; if it is only slow, raise `scrape.timeout`",
                )
            )
        elif not engine.speaks_vllm:
            found.append(
                error(
                    where,
                    "no metric on its /metrics is one of vLLM's",
                    blind,
                    "point `url` at the vLLM server itself, and start it without `--disable-log-stats`",
                )
            )
        elif page.refused:
            blinds = page.running is None or page.waiting is None
            found.append(
                (error if blinds else warning)(
                    where,
                    f"{page.refused} of its metrics have impossible values"
                    if page.refused <= MAX_SERIES
                    else f"it has more than {MAX_SERIES} series of the metrics that are read",
                    blind if blinds else "they count as unknown",
                    "see its /metrics; something between the engine and here may rewrite it, or put several into one",
                )
            )
        elif page.running is None or page.waiting is None:
            found.append(
                error(
                    where,
                    "running and waiting requests are not on its /metrics under the names that are known "
                    "(vllm:num_requests_running, vllm:num_requests_waiting)",
                    blind,
                    "run a vLLM from 0.6 on; if its names are newer than this router, update the router",
                )
            )
        elif page.kv_usage is None:
            found.append(
                warning(
                    where,
                    "the use of its KV cache is not on its /metrics under a name that is known",
                    "`kv_usage` is unknown there",
                    "update the router, or leave `kv_usage` out of the policy",
                )
            )
        elif engine.has_old_names:
            found.append(
                info(
                    where,
                    "its metrics have the names of a vLLM before 0.10; they are understood",
                    "such versions lack much of what the other checks look at",
                    "update vLLM",
                )
            )
    return found
