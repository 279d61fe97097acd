"""Makes a random-weights Qwen2 model with a real BPE tokenizer and a chat template: `make_tiny_model.py DIR`.

Runs in the virtual environment that `setup_vllm.sh` makes; 2 layers, hidden size 64, 2,048 tokens of vocabulary.
"""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

CONTEXT = 8192
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>"]
TEMPLATE = """{%- if tools %}<|im_start|>system
# Tools
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}{%- for m in messages %}<|im_start|>{{ m.role }}
{% if m.content is string %}{{ m.content }}\
{% elif m.content %}{% for c in m.content %}{{ c.text }}{% endfor %}{% endif %}\
{% if m.tool_calls %}{% for tc in m.tool_calls %}<tool_call>
{{ {"name": tc.function.name, "arguments": tc.function.arguments} | tojson }}
</tool_call>{% endfor %}{% endif %}<|im_end|>
{% endfor %}{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer trained on the standard library's source."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=2048, special_tokens=SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train([str(path) for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:120]], trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
    )
    fast.chat_template = TEMPLATE
    fast.model_max_length = CONTEXT
    return fast


def main(out: Path) -> None:
    """Write model, tokenizer and generation configuration to *out*."""
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(out)
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=CONTEXT,
            eos_token_id=tokenizer.eos_token_id,
            bos_token_id=None,
            pad_token_id=tokenizer.pad_token_id,
            tie_word_embeddings=True,
        )
    ).to(torch.bfloat16)
    model.save_pretrained(out)
    model.generation_config.save_pretrained(out)
    # transformers gives this model type a pre-tokenizer of its own; what it saves is what engines use.
    AutoTokenizer.from_pretrained(out).save_pretrained(out)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
