"""What an emulated instance answers without generating: its models, and tokens of a text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from smetric.emulator import template, tokenizer
from smetric.emulator.call import Limits, check_model, new_id
from smetric.emulator.error import InvalidBodyError
from smetric.emulator.fields import Fields

if TYPE_CHECKING:
    from smetric.emulator.instance import EmulatedInstance


def models(instance: EmulatedInstance) -> dict[str, Any]:
    """The list of models: the name and every alias."""
    created = int(instance.started_at)
    return {
        "object": "list",
        "data": [
            {
                "id": name,
                "object": "model",
                "created": created,
                "owned_by": "vllm",
                "root": instance.settings.model,
                "parent": None,
                "max_model_len": instance.limits.max_model_len,
                "permission": [
                    {
                        "id": new_id("modelperm-"),
                        "object": "model_permission",
                        "created": created,
                        "allow_create_engine": False,
                        "allow_sampling": True,
                        "allow_logprobs": True,
                        "allow_search_indices": False,
                        "allow_view": True,
                        "allow_fine_tuning": False,
                        "organization": "*",
                        "group": None,
                        "is_blocking": False,
                    }
                ],
            }
            for name in instance.limits.names
        ],
    }


def tokenize(fields: Fields, limits: Limits) -> dict[str, Any]:
    """Token ids of a `prompt`, or of `messages` under the chat template.

    Raises:
        EngineError: neither is given, or the model is another one.
    """
    check_model(fields, limits)
    if fields.values.get("messages") is not None:
        reply = fields.boolean("add_generation_prompt", default=True)
        is_open = fields.boolean("continue_final_message")
        tokens = template.render(fields.objects("messages"), fields.objects("tools"), reply, is_open)
    else:
        fields.required("prompt")
        tokens = tokenizer.encode(fields.string("prompt") or "")
    return {
        "count": tokenizer.count(tokens),
        "max_model_len": limits.max_model_len,
        "tokens": tokenizer.to_ids(tokens),
        "token_strs": tokenizer.strings(tokens) if fields.boolean("return_token_strs") else None,
    }


def detokenize(fields: Fields, limits: Limits) -> dict[str, Any]:
    """The text of `tokens`.

    Raises:
        EngineError: they are no ids, or the model is another one.
    """
    check_model(fields, limits)
    return {"prompt": tokenizer.decode(token_ids(fields.required("tokens"), "body.tokens"))}


def token_ids(value: object, at: str) -> bytes:
    """Packed tokens of a list of ids that came from outside.

    Raises:
        InvalidBodyError: it is no list of ids.
    """
    if not isinstance(value, list):
        raise InvalidBodyError("list_type", at, "Input should be a valid list", value)
    for index, item in enumerate(value):
        if not isinstance(item, int) or isinstance(item, bool) or not 0 <= item < tokenizer.VOCABULARY:
            raise InvalidBodyError("int_type", f"{at}.{index}", "Input should be a valid token id", item)
    return tokenizer.from_ids(value)
