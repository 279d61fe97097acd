"""What sources that follow requests on their way have in common: they look nothing up, and do nothing till told."""

from __future__ import annotations

from collections.abc import Sequence

from smetric.fleet.instance import Instance
from smetric.fleet.lease import Lease
from smetric.fleet.measure import Measured
from smetric.request import InferenceRequest
from smetric.sources.source import Source


class Follower(Source):
    """A source that learns from where requests go and when they are answered, and a `Measure`.

    What it keeps is bounded, and has an age.
    """

    #: Features that it fills at once.
    measures: frozenset[str] = frozenset()
    #: Fields of requests that it fills before they are decided.
    describes: frozenset[str] = frozenset()

    def measure(self, feature: str, instances: Sequence[Instance]) -> Measured:
        """One of the features it measures, over *instances*, now."""
        raise NotImplementedError(f"{self.name} measures no {feature}")

    def describe(self, request: InferenceRequest) -> None:
        """Fill its fields of *request*; called where a policy reads one of them."""

    def sent(self, request: InferenceRequest, lease: Lease) -> None:
        """*request* was charged to an instance."""

    def first_token(self, lease: Lease, seconds: float) -> None:
        """The stream of a charged request began *seconds* after it was sent."""
