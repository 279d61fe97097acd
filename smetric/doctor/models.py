"""Check of the models that instances serve: every name stands for one model, every alias for one that is served."""

from __future__ import annotations

from collections.abc import Iterable

from smetric.doctor.engine import Engine
from smetric.doctor.finding import Finding, error, info, listed, shown, warning
from smetric.doctor.site import Site


async def models(site: Site) -> list[Finding]:
    """Every name stands for one model, and every alias for one that is served."""
    found: list[Finding] = []
    by_name: dict[str, list[Engine]] = {}
    for engine in site.reachable:
        if engine.cards_problem:
            found.append(
                (info if engine.settings.models else error)(
                    engine.where,
                    f"its models are not known: {engine.cards_problem}",
                    "it is sent requests for any model",
                    "name its `models` under `instances`, or see why the engine does not list them",
                )
            )
        configured = set(engine.settings.models or ())
        names = {card.id for card in engine.cards} or configured
        missing = configured - names
        if missing:
            found.append(
                error(
                    engine.where,
                    f"it does not serve {listed(sorted(missing))}; it serves {listed(sorted(names))}",
                    "requests for that model are answered 404 by the engine",
                    "correct `models` of this instance, or its `--served-model-name`",
                )
            )
        for name in names:
            by_name.setdefault(name, []).append(engine)
    if not by_name and not site.settings.models:
        return found
    found += _differing(by_name)
    if all(engine.settings.models or not engine.cards_problem for engine in site.reachable):
        total, served = len(site.reachable), listed(sorted(by_name))
        found += [
            warning(
                engines[0].where,
                f"only it serves {shown(name)}; {total} instances answer",
                "requests for it can only go there, whatever the policy says",
                "give all engines of a model the same `--served-model-name`, or take this as meant",
            )
            for name, engines in sorted(by_name.items())
            if len(engines) == 1 and total > 1
        ]
        found += [
            error(
                f"models.{shown(alias)}",
                f"it stands for {shown(model)}, which no instance serves; served are {served}",
                "requests for it are answered 404",
                f"set `models.{shown(alias)}` to a name that is served",
            )
            for alias, model in site.settings.models.items()
            if model not in by_name
        ]
    return found


def _differing(by_name: dict[str, list[Engine]]) -> Iterable[Finding]:
    for name, engines in sorted(by_name.items()):
        cards = [(engine, card) for engine in engines if (card := engine.card(name)) is not None]
        for what, values, flag in (
            ("loaded from", {card.root for _, card in cards}, "--model"),
            ("cut off at", {card.max_model_len for _, card in cards}, "--max-model-len"),
        ):
            if len(values) > 1:
                yield warning(
                    f"model {shown(name)}",
                    f"it is {what} {listed(sorted(values, key=str))}, depending on the instance",
                    "an answer depends on where the request went, and KV blocks of one are worth nothing to another",
                    f"start all engines of {shown(name)} with the same `{flag}`",
                )
