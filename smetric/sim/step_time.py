"""How long one engine step takes: a linear model of what is in the batch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of one step = the sum of these, each times what it counts.

    The defaults are Qwen3-Coder-30B-A3B (bf16) on an H20, from the measured points of InferSim (Apache-2.0): 5.43 GFLOP
    of weights per token at 111 TFLOPS, 4 × 48 layers × 32 heads × 128 attention FLOP per token pair at 126 TFLOPS,
    96 KiB of KV per token read at 3.0 TB/s. `fixed_s` and `decode_s` are a straight line through its decode steps,
    where the expert weights read grow with the batch. They give 15.8k tokens/s of prefill at 4k prompts (measured:
    16.6k) and 39 ms for a batch of 100 at 5k context (measured: 38 ms).
    """

    #: Per step, whatever is in it.
    fixed_s: float = 8e-3
    #: Per prompt token computed.
    prefill_s: float = 4.9e-5
    #: Per pair of a computed prompt token and a token of its context.
    attention_s: float = 6.2e-9
    #: Per decoding sequence.
    decode_s: float = 1.5e-4
    #: Per token of context of a decoding sequence.
    context_s: float = 3.3e-8

    def __call__(self, prefill: int, pairs: float, decodes: int, context: int) -> float:
        """Seconds for *prefill* prompt tokens with *pairs* of attention and *decodes* sequences of *context* tokens."""
        return (
            self.fixed_s
            + self.prefill_s * prefill
            + self.attention_s * pairs
            + self.decode_s * decodes
            + self.context_s * context
        )
