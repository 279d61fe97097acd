"""What the conversion of a Messages body depends on in a model's chat template, found out by rendering probes.

The probes are those of vLLM 0.32 (`entrypoints/anthropic/serving.py`): engines make the same ones when they start.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from cachetools import TTLCache

from smetric.tokenize.chat import Chat, Refused
from smetric.tokenize.encoder import Encoder

#: Seconds after which a template is probed again: engines may have been restarted with another one.
TTL_S = 600.0
_EFFORTS = ("low", "medium", "high", "xhigh", "max")
_ALTERNATING = [{"role": role, "content": "t"} for role in ("system", "user", "system", "user")]


class TemplateTraits:
    """Traits of the models' chat templates.

    Args:
        encoder: renders the probes.
        clock: monotonic seconds.
    """

    def __init__(self, encoder: Encoder, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._encoder = encoder
        self._merging: TTLCache[str, bool] = TTLCache(256, TTL_S, timer=clock)
        self._efforts: TTLCache[str, str] = TTLCache(256, TTL_S, timer=clock)

    async def merges_inline_system(self, model: str) -> bool:
        """Whether *model*'s template refuses system messages after the first place, so that engines merge them.

        Raises:
            Unavailable: nobody can tell now.
        """
        known = self._merging.get(model)
        if known is None:
            known = await self._render(model, Chat(_ALTERNATING, add_generation_prompt=False)) is None
            self._merging[model] = known
        return known

    async def disabled_effort(self, model: str) -> str:
        """The effort that stands for disabled thinking: `low` where *model*'s template refuses or ignores `none`.

        Raises:
            Unavailable: nobody can tell now.
        """
        known = self._efforts.get(model)
        if known is None:
            known = "none"
            without = await self._render(model, _thinking("none"))
            if without is None:
                known = "low"
            else:
                for effort in _EFFORTS:
                    if await self._render(model, _thinking(effort)) == without:
                        known = "low"
                        break
            self._efforts[model] = known
        return known

    async def _render(self, model: str, chat: Chat) -> list[int] | None:
        """The ids of a probe; None where the template refuses it."""
        try:
            return list(await self._encoder.encode(model, chat, 0))
        except Refused:
            return None


def _thinking(effort: str) -> Chat:
    kwargs = {"reasoning_effort": effort, "enable_thinking": effort != "none"}
    return Chat([{"role": "user", "content": "Hi"}], template_kwargs=kwargs)
