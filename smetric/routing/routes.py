"""Routes: which policy decides on which request, by model, tenant or path.

A route has a policy, policies in shadow of it, and maybe a canary: a second policy that decides for a share of the
conversations. A conversation keeps its arm over restarts and on every router.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec
from msgspec import Raw

from smetric import names
from smetric.config.settings import LAST_ROUTE, RouteSettings, Settings
from smetric.config.values import ParamValue
from smetric.errors import UNREADABLE
from smetric.features import VOCABULARY
from smetric.files import policy_path
from smetric.request.request import Api, InferenceRequest
from smetric.routing.policy_files import PolicyFile, ReloadListener

if TYPE_CHECKING:
    from smetric.policy.fit import Labels
    from smetric.routing.shadow import ShadowJudge, Shadows


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """Condition on requests: each set that is not empty must contain the request's value.

    Args:
        models: models as clients name them; an alias also matches by the model it stands for.
        tenants: tenants as the tenant header names them.
        paths: paths of the data port.
    """

    models: frozenset[str] = frozenset()
    tenants: frozenset[str] = frozenset()
    paths: frozenset[str] = frozenset()

    def fits(self, request: InferenceRequest) -> bool:
        """Return whether *request* meets it."""
        return (
            (not self.models or request.model in self.models or request.alias in self.models)
            and (not self.tenants or request.tenant in self.tenants)
            and (not self.paths or request.path in self.paths)
        )


@dataclass(slots=True, eq=False)
class Arm:
    """An acting policy with the memory of its picks.

    Args:
        name: one of `names.ARMS`; empty if the route has one arm only.
        file: the policy.
    """

    name: str
    file: PolicyFile
    #: Per pick, the id of its last winner. Keyed by name, so it survives reloads and changes of the fleet. Replaced,
    #: never changed: a decision keeps the one it was given.
    cursors: Mapping[str, str] = field(default_factory=dict)


class Route:
    """Policies for some of the requests.

    Args:
        name: as configured.
        file: its policy.
        match: which requests.
        canary: the policy for a share of the conversations.
        share: that share, 0..1.
        shadows: policies evaluated beside the acting one.
    """

    def __init__(
        self,
        name: str,
        file: PolicyFile,
        *,
        match: Match | None = None,
        canary: PolicyFile | None = None,
        share: float = 0.0,
        shadows: Sequence[PolicyFile] = (),
    ) -> None:
        self.name = name
        self.match = match or Match()
        self.share = share
        self.control = Arm(names.CONTROL if canary is not None else "", file)
        self.canary = Arm(names.CANARY, canary) if canary is not None else None
        self.shadows: Shadows | None = None
        if shadows:
            from smetric.routing.shadow import Shadow, Shadows

            self.shadows = Shadows([Shadow(one) for one in shadows])
        self._key = hashlib.blake2b(name.encode(), digest_size=16).digest()

    def arm_of(self, request: InferenceRequest) -> Arm:
        """Return the arm of the conversation of *request*; an unknown conversation is on the control arm."""
        if self.canary is None:
            return self.control
        root = root_of(request)
        return self.canary if root is not None and self.place_of(root) < self.share else self.control

    def place_of(self, root: int) -> float:
        """Return the place of a conversation on 0..1. As the share grows, conversations below it stay below it."""
        digest = hashlib.blake2b(root.to_bytes(8), digest_size=8, key=self._key).digest()
        return int.from_bytes(digest) / 2**64

    def files(self) -> Iterator[PolicyFile]:
        """Yield all its policies, the acting ones first."""
        yield self.control.file
        if self.canary is not None:
            yield self.canary.file
        if self.shadows is not None:
            yield from self.shadows.files


class Routes:
    """All routes, in the order in which they are tried.

    Args:
        routes: the last one fits every request.
    """

    def __init__(self, routes: Sequence[Route]) -> None:
        *self._first, self.last = routes
        self.all = tuple(routes)

    def of(self, request: InferenceRequest) -> Route:
        """Return the first route that fits *request*."""
        return next((route for route in self._first if route.match.fits(request)), self.last)

    def find(self, name: str) -> tuple[Route, PolicyFile]:
        """Return the policy called *name*: the name of its route, or its own name if only one acting policy has it.

        Raises:
            KeyError: there is none, or there are several; the message lists the names.
        """
        every = [(route, file) for route in self.all for file in route.files()]
        for route, file in every:
            if file.name == name:
                return route, file
        acting = [(route, arm.file) for route, arm in self.acting() if arm.file.current.policy.name == name]
        if len(acting) == 1:
            return acting[0]
        among = ", ".join(file.name for _, file in acting or every)
        raise KeyError(f"{'several policies are' if acting else 'no policy is'} called {name}; name one of {among}")

    def files(self) -> list[PolicyFile]:
        """Return all policies."""
        return [file for route in self.all for file in route.files()]

    def shadows(self) -> list[PolicyFile]:
        """Return the policies in shadow."""
        return [file for route in self.all if route.shadows is not None for file in route.shadows.files]

    def shadow_judge(self) -> ShadowJudge | None:
        """Return the listener that evaluates the policies in shadow; None without any."""
        if not self.shadows():
            return None
        from smetric.routing.shadow import ShadowJudge

        return ShadowJudge()

    def acting(self) -> list[tuple[Route, Arm]]:
        """Return all arms."""
        return [(route, arm) for route in self.all for arm in (route.control, route.canary) if arm is not None]


def labels_of(settings: Settings) -> Labels:
    """Return what the configuration says of the instances; `model` only if it names the models of all of them."""
    instances = settings.instances
    labels = {name: [getattr(one, name) for one in instances] for name in ("id", "role", "pool", "zone")}
    if all(one.models for one in instances):
        labels["model"] = [min(one.models or ()) for one in instances]
    return labels if instances else {}


def routes_of(settings: Settings, on_reload: ReloadListener) -> Routes:
    """Return the routes of *settings*.

    Raises:
        ConfigError: a policy cannot be read.
        PolicyError: a policy does not check.
    """
    last = RouteSettings(
        name=LAST_ROUTE,
        policy=settings.policy,
        params=settings.params,
        shadow=settings.shadow,
        canary=settings.canary,
    )
    labels = labels_of(settings)
    return Routes([_route(one, on_reload, labels) for one in (*settings.routes, last)])


def _route(settings: RouteSettings, on_reload: ReloadListener, labels: Labels) -> Route:
    def file(policy: str, params: Mapping[str, ParamValue], name: str) -> PolicyFile:
        return PolicyFile(policy_path(policy), VOCABULARY, params, on_reload, name=name, labels=labels)

    name, match, canary = settings.name, settings.match, settings.canary
    return Route(
        name,
        file(settings.policy, settings.params, name),
        match=Match(models=frozenset(match.model), tenants=frozenset(match.tenant), paths=frozenset(match.path)),
        canary=file(canary.policy, canary.params, f"{name}:{names.CANARY}") if canary.policy else None,
        share=canary.share,
        shadows=[
            file(one.policy, one.params, f"{name}:{names.SHADOW}-{number}")
            for number, one in enumerate(settings.shadow, start=1)
        ],
    )


class _Block(msgspec.Struct):
    """Content block without its cache mark, which moves on while a conversation grows."""

    text: str = ""
    source: Raw = Raw()
    image_url: Raw = Raw()


class _Message(msgspec.Struct):
    role: str | None = None
    content: Raw = Raw(b"null")  # decoded only where it counts; later messages may have any shape


class _Body(msgspec.Struct):
    messages: list[_Message] = []
    input: str | list[_Message] = []


_decode = msgspec.json.Decoder(_Body).decode
_content = msgspec.json.Decoder(str | list[_Block | str] | None).decode


def root_of(request: InferenceRequest) -> int | None:
    """Return a 64-bit hash of the conversation of *request*, the same in every process; None if it is unknown.

    The conversation is the session that the client names, else the text of its first user message. The prompt of a
    completion does not show where its first turn ended. Call it while the request has its body. The hash is neither
    logged nor recorded.
    """
    if request.session:
        return _hash(b"session", request.session)
    if request.body is None or request.api in (Api.COMPLETIONS, Api.OTHER):
        return None
    try:
        body = _decode(request.body)
        if isinstance(body.input, str):
            return _hash(b"text", body.input) if body.input else None
        for message in body.messages or body.input:
            if message.role == "user" and (content := _content(message.content)):
                return _hash(b"text", *([content] if isinstance(content, str) else map(_text, content)))
    except UNREADABLE:
        pass  # the engine judges whether it is a fault
    return None


def _text(block: _Block | str) -> str:
    if isinstance(block, str):
        return block
    return block.text or bytes(block.source or block.image_url).decode(errors="replace")


def _hash(kind: bytes, *texts: str) -> int:
    digest = hashlib.blake2b(digest_size=8, key=kind)
    for text in texts:
        digest.update(text.encode(errors="replace"))
        digest.update(b"\0")
    return int.from_bytes(digest.digest())
