"""Random valid policies, over a small vocabulary of their own."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from smetric.policy import Feature, Kind, RequestField, Unknown, Vocabulary
from smetric.policy.vocabulary import LARGEST

_WORDS: dict[str, Any] = {"source": "random", "staleness": "none"}
VOCABULARY = Vocabulary(
    {
        feature.name: feature
        for feature in (
            Feature(name="near", doc="Cheap.", high=9.0, **_WORDS),
            Feature(name="far", doc="Cheap, mean when unknown.", high=9.0, unknown=Unknown.MEAN, **_WORDS),
            Feature(name="hits", doc="A look-up.", high=9.0, lookup=True, **_WORDS),
            Feature(name="deep", doc="Another look-up.", high=9.0, lookup=True, **_WORDS),
            Feature(name="well", doc="Truth.", kind=Kind.BOOL, default=False, **_WORDS),
            Feature(name="side", doc="Text.", kind=Kind.STRING, default="", **_WORDS),
        )
    },
    {
        field.name: field
        for field in (
            RequestField(name="turn", doc="May be unknown.", high=9.0, may_be_unknown=True),
            RequestField(name="held", doc="As the router's.", unit="seconds"),
            RequestField(name="key", doc="Text.", kind=Kind.STRING, default=""),
            RequestField(name="size", doc="At least 1.", low=1.0, high=9.0, default=1.0),
        )
    },
)


#: The same words over the full range of numbers.
WIDE = Vocabulary(
    {name: replace(word, high=LARGEST) for name, word in VOCABULARY.features.items()},
    {name: replace(word, high=LARGEST) for name, word in VOCABULARY.request.items()},
)


class Author:
    """Writes random valid policies in which no constant determines what is read.

    With other *literals* a policy may be refused: a product too large, a share above 1. If *settled*, parameters
    determine conditions, and single values stand in place of values per candidate.
    """

    def __init__(
        self, rng: random.Random, literals: Sequence[str] = ("0", "2", "3.5"), *, settled: bool = False
    ) -> None:
        self.rng = rng
        self.literals = literals
        self.vectors: list[str] = []
        self.numbers: list[str] = []
        self.masks: list[str] = []
        self.truths: list[str] = ["ON", "OFF"] if settled else []
        self.scores: list[str] = ["0", "max(hits)", "req.size"] if settled else ["0"]
        self.picks: list[str] = []

    def one_of(self, *makers: Any) -> str:
        maker = self.rng.choice(makers)
        return str(maker() if callable(maker) else maker)

    def vector(self, depth: int) -> str:
        if depth <= 0:
            return self.rng.choice(["near", "far", "hits", "deep", *self.vectors])
        v, n, d = self.vector, self.number, depth - 1
        return self.one_of(
            lambda: v(0),
            lambda: f"({v(d)} {self.rng.choice('+-*')} {v(d)})",
            lambda: f"({n(d)} {self.rng.choice('+-*')} {v(d)})",
            lambda: f"{v(d)} / greatest({v(d)}, 1)",
            lambda: f"norm({v(d)})",
            lambda: f"rank({v(d)})",
            lambda: f"share(abs({v(d)}))",
            lambda: f"{v(d)} / (2 - {self.rng.choice(['norm', 'share'])}(abs({v(d)})))",
            lambda: "hrw(req.key)",
            lambda: 'hrw("home")',
            lambda: f"({v(d)} if {self.mask(d)} else {v(d)})",
            lambda: f"({v(d)} if {self.truth(d)} else {v(d)})",
            lambda: f"{self.rng.choice(['least', 'greatest'])}({v(d)}, {n(d)}, {v(d)})",
            lambda: f"clamp({v(d)}, 1, 5)",
            lambda: f"ratio({v(d)}, {v(d)}, default: {n(d)})",
            lambda: f"abs({v(d)} - {n(d)})",
        )

    def number(self, depth: int) -> str:
        if depth <= 0:
            return self.rng.choice([*self.literals, "req.turn", "req.size", *self.numbers])
        v, n, d = self.vector, self.number, depth - 1
        options = [
            lambda: n(0),
            lambda: f"{self.rng.choice(['mean', 'min', 'max', 'sum'])}({v(d)})",
            lambda: f"{self.rng.choice(['mean', 'min', 'max'])}({v(d)} where {self.mask(d)}, default: {n(d)})",
            lambda: f"{self.rng.choice(['sum', 'std'])}({v(d)} where {self.mask(d)})",
            lambda: f"quantile({v(d)}, {self.rng.choice(['0', '0.5', '0.9', '1'])})",
            lambda: f"quantile({v(d)} where {self.mask(d)}, 0.25, default: {n(d)})",
            lambda: "bucket(req.key)",
            lambda: f"count({self.mask(d)})",
            lambda: "count()",
            lambda: f"({n(d)} {self.rng.choice('+-*')} {n(d)})",
            lambda: f"({n(d)} if {self.truth(d)} else {n(d)})",
            lambda: f"ratio({n(d)}, {n(d)} - req.size, default: {n(d)})",
            lambda: f"least({n(d)}, {n(d)})",
        ]
        if self.picks:
            options.append(lambda: f"{self.rng.choice(['near', 'hits', *self.vectors])}[{self.rng.choice(self.picks)}]")
        return self.one_of(*options)

    def mask(self, depth: int) -> str:
        if depth <= 0:
            return self.rng.choice(["well", "near > 3", "hits > 2", 'side == "x"', 'side in {"x", "y"}', *self.masks])
        m, v, n, d = self.mask, self.vector, self.number, depth - 1
        return self.one_of(
            lambda: m(0),
            lambda: f"{v(d)} {self.rng.choice(['<', '<=', '>', '>=', '==', '!='])} {self.one_of(v(d), self.number(d))}",
            lambda: f"({m(d)} {self.rng.choice(['and', 'or'])} {m(d)})",
            lambda: f"({self.truth(d)} {self.rng.choice(['and', 'or'])} {m(d)})",
            lambda: f"({m(d)} and {self.truth(d)})",
            lambda: f"not ({m(d)})",
            lambda: f"known({v(d)} + near)",
            lambda: f"draw(greatest({n(d)}, req.turn))",
            lambda: f"top({v(d)}, greatest({n(d)}, req.turn))",
            lambda: f"top({v(d)}, 2, then: {v(d)})",
            lambda: f"fresh({v(d)} + near, 5s)",
        )

    def truth(self, depth: int) -> str:
        if depth <= 0:
            return self.rng.choice(["req.turn > 2", "req.size < 4", *self.truths])
        t, d = self.truth, depth - 1
        return self.one_of(
            lambda: t(0),
            lambda: f"{self.number(d)} {self.rng.choice(['<', '<=', '>', '>='])} {self.number(d)} * req.size",
            lambda: f"{self.rng.choice(['any', 'all'])}({self.mask(d)})",
            lambda: f"any({self.mask(d)} where {self.mask(d)})",
            lambda: f"({t(d)} {self.rng.choice(['and', 'or'])} {t(d)})",
            lambda: f"not ({t(d)})",
            lambda: "chance(0.5)",
            lambda: "bucket(req.key) < 0.5",
        )

    def pick(self, depth: int, maybe: bool = False) -> str:
        function = self.rng.choice(["argmin", "argmax", "rr_argmin", "rr_argmax", "softmin", "softmax", "sample"])
        where = f" where {self.mask(depth)}" if maybe else ""
        then = f", then: {self.vector(1)}" if self.rng.random() < 0.4 else ""
        if function.startswith("rr_") and self.rng.random() < 0.3:
            then += f", within: abs({self.number(1)})"
        elif function.startswith("soft"):
            then = f", temperature: {self.rng.choice(['0', '0.5', 'abs(' + self.number(1) + ')'])}"
        elif function == "sample":
            then = ""
        plain = f"{function}({self.one_of(self.vector(depth), *self.scores)}{where}{then})"
        options = [lambda: plain]
        if not maybe:
            options.append(lambda: f"first({self.pick(1, maybe=True)}, {plain})")
            if self.picks:
                options.append(lambda: self.rng.choice(self.picks))
                options.append(lambda: f"{self.rng.choice(self.picks)} if {self.truth(1)} else {plain}")
        return self.one_of(*options)

    def when(self) -> str:
        return " and ".join(self.truth(2) for _ in range(self.rng.randint(1, 3)))

    def lets(self, suffix: str) -> list[str]:
        lines = []
        for kind in self.rng.sample(["vector", "number", "mask", "truth"], k=self.rng.randint(1, 3)):
            name = f"{kind}{suffix}"
            lines.append(f"let {name} = {getattr(self, kind)(2)}")
            {"vector": self.vectors, "number": self.numbers, "mask": self.masks, "truth": self.truths}[kind].append(
                name
            )
        return lines

    def policy(self) -> str:
        rng = self.rng
        lines = ["policy random", "param WEIGHT = 1.5", "param ON = true", "param OFF = false"]
        lines += ["def scaled(x, y) = x * WEIGHT + y", *self.lets("_a")]
        self.vectors.append(f"scaled({self.vector(1)}, {self.number(1)})")
        for at in range(rng.randint(0, 2)):
            when = f" when {self.when()}" if rng.random() < 0.5 else ""
            lines += [f"{rng.choice(['keep', 'prefer'])} {self.mask(2)}{when}", *self.lets(f"_f{at}")]
        for at in range(rng.randint(0, 2)):
            lines.append(f"let pick_{at} = {self.pick(2)}")
            self.picks.append(f"pick_{at}")
        for _ in range(rng.randint(0, 3)):
            kind = rng.random()
            if kind < 0.1:
                lines.append(f"hold for {self.rng.randint(0, 3)}s when {self.when()}")
            elif kind < 0.2:
                lines.append(f'reject 429 "full" when {self.when()}')
            elif kind < 0.4:
                lines.append(f"route {self.pick(2, maybe=True)}")
            else:
                lines.append(f"route {self.pick(2)} when {self.when()}")
        lines.append(f"route {self.pick(2)}")
        return "\n".join(lines) + "\n"
