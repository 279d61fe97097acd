"""Which feature each parameter of features may stand for, and the combinations that a policy is checked for.

Whether such a parameter is declared well is judged in `check_parameter`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping

from smetric.policy import tree
from smetric.policy.library import Linked, taken
from smetric.policy.parameter import Settings
from smetric.policy.vocabulary import Kind, Vocabulary

#: Combinations of features that a policy may be checked for.
MAX_COMBINATIONS = 16

#: The feature that each feature parameter stands for; one of a library is called `library.NAME`.
Choice = Mapping[str, str]


def feature_choices(
    file: tree.File, linked: Linked, vocabulary: Vocabulary, settings: Settings
) -> dict[str, tuple[str, ...]]:
    """The choices of each feature parameter, that of *settings* or else its default first; what is no feature left out.

    Settings reach the parameters of a library that the policy itself takes.
    """
    found: dict[str, tuple[str, ...]] = {}
    own = taken(file)
    for library, statement in _parameters(file, linked):
        if isinstance(statement.value, tree.Name):
            listed = statement.domain.items if isinstance(statement.domain, tree.Choices) else ()
            names = dict.fromkeys(item.name for item in (statement.value, *listed) if isinstance(item, tree.Name))
            features = tuple(
                name for name in names if name in vocabulary.features and vocabulary.features[name].kind is Kind.NUMBER
            )
            chosen = settings.values.get(statement.name) if not library or (library, statement.name) in own else None
            if chosen in features:
                features = (str(chosen), *(name for name in features if name != chosen))
            if features:
                found[f"{library}.{statement.name}" if library else statement.name] = features
    return found


def _parameters(file: tree.File, linked: Linked) -> Iterator[tuple[str, tree.Param]]:
    """The `param`s of a policy and its libraries, each with the name of its library, empty for the policy."""
    for library, each in (("", file), *linked.files.items()):
        yield from ((library, statement) for statement in each.statements if isinstance(statement, tree.Param))


def combinations(choices: Mapping[str, tuple[str, ...]]) -> list[Choice]:
    """All choices of features, those that stand first in all of *choices* first, cut at `MAX_COMBINATIONS`."""
    products = itertools.islice(itertools.product(*choices.values()), MAX_COMBINATIONS)
    return [dict(zip(choices, product, strict=True)) for product in products]
