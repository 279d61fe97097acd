"""The sections that say which policy serves which request, and what watches over a change of one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from smetric.config.address import PolicyRef
from smetric.config.kind import Choice, Flag, Integer, Number, ParamValue, Text
from smetric.config.quantity import Duration
from smetric.config.section import ListOf, MapOf, OneOrMore, Section, setting
from smetric.config.text import MODEL

_NAME = Text(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}", "at most 64 of A-Z a-z 0-9 _ . -", empty=True)
_TENANT = Text(r"[\x20-\x7e]{1,256}", "the name of a tenant, 1 to 256 printable ASCII characters")
#: Paths whose requests a policy decides on.
PATHS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/messages",
    "/v1/responses",
    "/v1/audio/transcriptions",
    "/v1/audio/translations",
    "/v1/classify",
    "/v1/embeddings",
    "/v1/moderations",
    "/v1/pooling",
    "/v1/rerank",
    "/v1/score",
)

#: The name of the route that `policy` stands for.
LAST_ROUTE = "default"
#: How many policies may be in shadow of one, and how many observed.
MOST_SHADOWS = 8
MOST_OBSERVED = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class ShadowSettings:
    """A policy beside the acting ones, in shadow or observed. A bare name stands for one with that `policy`."""

    policy: str = setting(PolicyRef(), "A shipped policy by name, or the path of a `.policy` file.")
    params: Mapping[str, float | str | bool] = setting(MapOf(ParamValue()), "Values for its parameters.", {})


@dataclass(frozen=True, slots=True, kw_only=True)
class CanarySettings:
    """A policy that decides for a share of the conversations."""

    policy: str = setting(
        PolicyRef(empty=True), "A shipped policy by name, or the path of a `.policy` file; none when not set.", ""
    )
    params: Mapping[str, float | str | bool] = setting(MapOf(ParamValue()), "Values for its parameters.", {})
    share: float = setting(
        Number(0.0, 1.0),
        "Share of the conversations it decides for; each stays where it is from its first turn on.",
        0.05,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MatchSettings:
    """Which requests: all that is set must fit, and of a list one; nothing set fits all."""

    model: tuple[str, ...] = setting(
        OneOrMore(MODEL), "Models, as clients name them; an alias fits by what it stands for, too.", ()
    )
    tenant: tuple[str, ...] = setting(OneOrMore(_TENANT), "Tenants, as `tenant_header` names them.", ())
    path: tuple[str, ...] = setting(
        OneOrMore(Choice(*PATHS)), "Paths of the data port, such as `/v1/chat/completions`.", ()
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteSettings:
    """The policy for some of the requests."""

    name: str = setting(
        _NAME, "Its name in metrics, traces and `/admin/policies`; `route-1` and so on by place when not set.", ""
    )
    match: MatchSettings = setting(Section(MatchSettings), "Which requests.", MatchSettings())
    policy: str = setting(PolicyRef(), "A shipped policy by name, or the path of a `.policy` file.")
    params: Mapping[str, float | str | bool] = setting(MapOf(ParamValue()), "Values for the policy's parameters.", {})
    shadow: tuple[ShadowSettings, ...] = setting(
        ListOf(Section(ShadowSettings, shorthand="policy"), most=MOST_SHADOWS), "Policies evaluated beside it.", ()
    )
    canary: CanarySettings = setting(
        Section(CanarySettings), "A policy for a share of its conversations.", CanarySettings()
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardrailSettings:
    """Restoring the policy that was there before, when load or errors leave their band after a policy file changed."""

    enabled: bool = setting(Flag(), "Whether it is done.", True)
    imbalance_percent: int = setting(
        Integer(110, 100_000),
        "Requests of the changed policy on the busiest instance, of the mean of those for the same models, from which "
        "load is out of band; a quarter more than before the change if that is more.",
        300,
    )
    errors_percent: int = setting(
        Integer(1, 100), "Share of requests answered 429 or 5xx, more than before the change, that is out of band.", 20
    )
    window: float = setting(Duration("100ms", "10m"), "Time over which both are taken.", 10.0)
    watch: float = setting(Duration("1s", "24h"), "Time after a change in which it is watched.", 600.0)
