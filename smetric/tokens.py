"""Token counts without a tokenizer: rendered bytes per token, learned per model from what engines report.

Rendering is in `smetric.reading.prompt` and `smetric.reading.conversation`; exact token ids are not here.
"""

from __future__ import annotations

#: Bytes per token before anything was learned.
INITIAL = 4.0
#: A learned ratio stays within these: fewer or more bytes per token is a report about something else.
LEAST, MOST = 1.0, 16.0
#: Prompts below this many tokens are mostly chat template and teach nothing.
MIN_TOKENS = 64
#: Models remembered; the one learned from longest ago goes first.
MAX_MODELS = 256
#: Weight of a sample once there are many, how many that is, and how far one sample may lie from the average before it
#: is clipped.
WEIGHT = 0.05
MANY = round(1 / WEIGHT) - 1
CLIP = 1.5


class TokenRatio:
    """Bytes of rendered prompt per token, one moving average per model.

    Prompt length, expected hit and hit length use the same ratio, so shares are right even where counts are not.
    """

    def __init__(self) -> None:
        self._learned: dict[str, tuple[float, int]] = {}

    def of(self, model: str) -> float:
        """Bytes per token of *model*; `INITIAL` while nothing was learned."""
        learned = self._learned.get(model)
        return INITIAL if learned is None else learned[0]

    def learn(self, model: str, rendered_bytes: int, prompt_tokens: int) -> None:
        """Take in an engine's own count.

        The first sample is taken as it is; after that each one is clipped to a factor `CLIP` around the average, so
        that one wrong report moves it by a few per cent.

        Args:
            model: as the request named it.
            rendered_bytes: `Prompt.size` of a request of one prompt.
            prompt_tokens: `usage.prompt_tokens` of its answer.
        """
        if prompt_tokens < MIN_TOKENS or rendered_bytes <= 0:
            return
        sample = _within(rendered_bytes / prompt_tokens, LEAST, MOST)
        learned = self._learned.pop(model, None)
        if learned is None:
            if len(self._learned) >= MAX_MODELS:
                del self._learned[next(iter(self._learned))]
            self._learned[model] = (sample, 1)
            return
        ratio, samples = learned
        sample = _within(sample, ratio / CLIP, ratio * CLIP)
        ratio += (sample - ratio) * (WEIGHT if samples >= MANY else 1 / (samples + 1))
        self._learned[model] = (ratio, samples + 1)


def _within(value: float, least: float, most: float) -> float:
    return least if value < least else most if value > most else value
