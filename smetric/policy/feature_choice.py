"""Which feature each parameter of features may stand for, and the combinations that a policy is checked for.

Whether such a parameter is declared well is judged in `check_parameter`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping

from smetric.policy import tree
from smetric.policy.library import Linked
from smetric.policy.parameter import Settings
from smetric.policy.vocabulary import Kind, Vocabulary

#: Combinations of features that a policy may be checked for.
MAX_COMBINATIONS = 16

#: The feature that each feature parameter stands for; one of a library is called `library.NAME`.
Choice = Mapping[str, str]


def feature_choices(file: tree.File, linked: Linked, vocabulary: Vocabulary) -> dict[str, tuple[str, ...]]:
    """The choices of each feature parameter, its default first; those that are no features left out."""
    found: dict[str, tuple[str, ...]] = {}
    for prefix, statement in _parameters(file, linked):
        if isinstance(statement.value, tree.Name):
            listed = statement.domain.items if isinstance(statement.domain, tree.Choices) else ()
            names = dict.fromkeys(item.name for item in (statement.value, *listed) if isinstance(item, tree.Name))
            features = tuple(
                name for name in names if name in vocabulary.features and vocabulary.features[name].kind is Kind.NUMBER
            )
            if features:
                found[prefix + statement.name] = features
    return found


def _parameters(file: tree.File, linked: Linked) -> Iterator[tuple[str, tree.Param]]:
    """The `param`s of a policy and its libraries, with what goes before their names in a `Choice`."""
    for prefix, each in (("", file), *((f"{name}.", library) for name, library in linked.files.items())):
        yield from ((prefix, statement) for statement in each.statements if isinstance(statement, tree.Param))


def combinations(choices: Mapping[str, tuple[str, ...]], settings: Settings) -> list[Choice]:
    """All choices of features, the configured one first, cut at `MAX_COMBINATIONS`."""
    ordered = {
        name: sorted(features, key=lambda feature, name=name: feature != settings.values.get(name.rpartition(".")[2]))  # type: ignore[misc]
        for name, features in choices.items()
    }
    products = itertools.islice(itertools.product(*ordered.values()), MAX_COMBINATIONS)
    return [dict(zip(ordered, product, strict=True)) for product in products]
