"""How full the instances and the router are, for autoscalers: 1 when full, more when more is asked for."""

from __future__ import annotations

from collections.abc import Callable

from smetric.fleet.fleet import Fleet
from smetric.proxy.admission import Admission
from smetric.telemetry.overload_gauges import OverloadFigures


class Saturation:
    """Computes it when somebody asks.

    Args:
        fleet: the instances.
        admission: who is let in, and who waits.
        connections: of clients: how many there are, and how many there may be.
    """

    def __init__(self, fleet: Fleet, admission: Admission, connections: Callable[[], tuple[int, int]]) -> None:
        self._fleet = fleet
        self._admission = admission
        self._connections = connections

    def instances(self) -> float | None:
        """Of the instances: the largest of three; None where nobody knows, for who asks would take 0 for idle.

        - Mean share of KV blocks in use, plus requests waiting for each one running, over the instances that are not
          drained and have been scraped lately;
        - 1 + requests held by rules for each one under way, while there are any: what the policy calls full is full;
        - requests under way and waiting for a place, over `overload.in_flight` where that is set.
        """
        values: list[float] = []
        now, oldest = self._fleet.clock(), self._fleet.unknown_after_s
        serving = [one for one in self._fleet.instances if not one.draining]
        scrapes = [one.scrape for one in serving if one.scrape is not None and now - one.scrape.measured_at < oldest]
        if scrapes:
            usages = [scrape.kv_usage for scrape in scrapes if scrape.kv_usage is not None]
            running = sum(scrape.running for scrape in scrapes)
            waiting = sum(scrape.waiting for scrape in scrapes)
            values.append((sum(usages) / len(usages) if usages else 0.0) + waiting / max(1.0, running))
        queue, slots = self._admission.queue, self._admission.slots
        for_a_place = queue.ahead(None)
        by_rules = queue.size - for_a_place
        if by_rules:
            values.append(1.0 + by_rules / max(1, sum(one.own for one in self._fleet.instances)))
        if slots is not None:
            values.append((slots.taken + for_a_place) / slots.most)
        if not values:
            return None if serving else 0.0
        return max(values)

    def router(self) -> float:
        """Of the router: the largest share it has taken of a bound from which on it refuses."""
        admission, (connections, most) = self._admission, self._connections()
        shares = [*admission.overload.shares.values(), admission.bytes / admission.most_bytes]
        if most:
            shares.append(connections / most)
        return max(shares)

    def figures(self) -> OverloadFigures:
        """All there is to show."""
        admission, instances = self._admission, self.instances()
        known = {} if instances is None else {"instances": instances}
        return OverloadFigures(
            queue_requests=admission.queue.size,
            queue_bytes=admission.queue.bytes,
            body_bytes=admission.bytes,
            connections=self._connections()[0],
            levels={name: int(level) for name, level in admission.overload.levels.items()},
            saturation={**known, "router": self.router()},
        )
