"""What a prefill costs: its tokens, and the attention they pay to all before them, in tokens without attention."""

from __future__ import annotations

#: Tokens of context at which attention costs as much as the weights (L_eq): about active parameters / (2 × layers ×
#: query heads × head size). This one is of the 30B model of the SMetric paper's revision.
ATTENTION_TOKENS = 6923.0


def twice_attended(new: int, prompt_len: int) -> int:
    """Twice the pairs of tokens that attend to each other when the last *new* tokens of a prompt are computed."""
    return new * (2 * prompt_len - new)


def prefill_cost(new: int, twice_pairs: int, attention_tokens: float) -> float:
    """Tokens without attention that cost as much as *new* ones with it: n + n (L - n / 2) / L_eq, over all prompts."""
    return new + twice_pairs / (2 * attention_tokens)
