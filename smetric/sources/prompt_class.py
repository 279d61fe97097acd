"""Classes of prompts that begin alike: how large a share each has of the traffic, and whether it follows its caches.

A class that floods the instances which hold its beginning is a hot spot (LMetric, "KV hot-spots"); what to do about it
is a policy's business.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable

from smetric.fleet.lease import Lease
from smetric.request import InferenceRequest
from smetric.sources.follower import Follower

#: Requests that the window holds (Dynamo's port of LMetric), and seconds after which one is no news.
WINDOW = 1000
FRESH_S = 600.0


class PromptClasses(Follower):
    """Fills `req.class_share` and `req.class_streak`; the class of a request is its `req.prefix`, computed here while
    the text is there.

    It counts from when a policy first asks.

    Args:
        clock: monotonic seconds.
    """

    name = "prompt_class"
    describes = frozenset({"prefix", "class_share", "class_streak"})

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._is_asked = False
        self._window: deque[tuple[float, str]] = deque()
        self._counts: Counter[str] = Counter()
        #: Of each class in the window: how many of its last requests went to an instance that held some of them.
        self._streaks: dict[str, int] = {}

    def describe(self, request: InferenceRequest) -> None:
        """Say how its class has fared so far."""
        self._is_asked = True
        self._forget_old()
        if self._window and request.prefix:
            request.class_share = self._counts[request.prefix] / len(self._window)
            request.class_streak = float(self._streaks.get(request.prefix, 0))

    def sent(self, request: InferenceRequest, lease: Lease) -> None:
        """Enter the request into the window."""
        key = request.prefix if self._is_asked else ""
        if not key:
            return
        self._window.append((self._clock(), key))
        self._counts[key] += 1
        held = lease.new_tokens < lease.prompt_len
        self._streaks[key] = self._streaks.get(key, 0) + 1 if held else 0
        self._forget_old()

    def _forget_old(self) -> None:
        since = self._clock() - FRESH_S
        while self._window and (len(self._window) > WINDOW or self._window[0][0] < since):
            _, key = self._window.popleft()
            self._counts[key] -= 1
            if not self._counts[key]:
                del self._counts[key], self._streaks[key]
