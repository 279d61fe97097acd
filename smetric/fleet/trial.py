"""What one request says of the instances it was tried on, told to their health once the request is over.

A request that two instances fail at says more of itself than of them, and is held against neither: otherwise a client
that sends one poisonous request again and again would have one instance after the other ejected.
"""

from __future__ import annotations

from smetric.fleet.health import Health
from smetric.fleet.lease import Lease
from smetric.telemetry import names

#: An instance that has no room answers so.
FULL = 503
#: Who is asked too often answers so, whether that is the client's doing or not.
TOO_MANY = 429
#: A queue that is full, or something the engine cannot do: answers of one that is well.
NEUTRAL = frozenset({501, FULL})


class Trial:
    """One request; `close` is called when it is over, whatever happened.

    Who failed first is judged when another one begins to answer: streams are long, and until it is judged an instance
    that fails at once looks idle, and draws the crowd.

    Args:
        health: judges the instances.
    """

    __slots__ = ("_aborted", "_blamed", "_failures", "_health")

    def __init__(self, health: Health) -> None:
        self._health = health
        self._failures = 0
        self._aborted = False
        self._blamed: tuple[Lease, str] | None = None

    def ended(self, lease: Lease, result: str, status: int | None) -> None:
        """An attempt has ended with *result*, one of `names.RESULTS`; *status* is what the instance answered.

        No answer of 4xx, and nothing that the client ended, says anything of an instance.
        """
        if lease.is_past:
            return
        instance = lease.instance
        if status == FULL:
            self._health.spare(instance)
        elif status == TOO_MANY:
            self._health.doubted(instance)
        if result in (names.CONNECT_ERROR, names.CONNECT_TIMEOUT):
            self._health.refused(instance)
        elif result == names.OK:
            if status is not None and status < 400 and not self._aborted:
                self._health.succeeded(instance)
        elif result in (names.CLOSED, names.PROTOCOL, names.TIMEOUT) or (
            result == names.STATUS_5XX and status not in NEUTRAL
        ):
            self._failures += 1
            self._blamed = (lease, result)
            self._health.doubted(instance)

    def answers(self, status: int) -> None:
        """An instance begins to answer with *status*, which the client is given."""
        if status < 400:
            self.close()
            self._blamed = None

    def stopping(self, lease: Lease) -> None:
        """The instance answered that it is shutting down."""
        if not lease.is_past:
            self._health.stopping(lease.instance)

    def aborted(self, lease: Lease) -> None:
        """The instance ended its answer with `finish_reason: abort`."""
        if not lease.is_past:
            self._aborted = True
            self._health.aborted(lease.instance)

    def waited(self, lease: Lease, seconds: float) -> None:
        """The first byte of a stream came after *seconds*."""
        self._health.waited(lease.instance, seconds, lease.ahead)

    def untried(self) -> None:
        """It was not tried elsewhere though others are there: whether it or the instance is to blame nobody knows."""
        self._blamed = None

    def close(self) -> None:
        """The request is over."""
        if self._failures == 1 and self._blamed is not None:
            lease, result = self._blamed
            if not lease.is_past:
                self._health.failed(lease.instance, result)
