"""The recorded prompts, and what tests need to tokenise one, those against real engines too."""

from __future__ import annotations

import json
import shutil
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smetric.request.reader import ReaderSettings, parse
from smetric.request.request import Api, InferenceRequest, TokenRatio
from smetric.sources.tokens.chat import Encoder
from smetric.sources.tokens.request_tokens import RequestTokens

DATA = Path(__file__).parents[2] / "data" / "tokenize"
TEMPLATES = ("plain", "thinking")


@dataclass(frozen=True)
class Recorded:
    """A body and the ids that vLLM made of its first prompt."""

    api: Api
    body: dict[str, Any]
    ids: list[int]

    @property
    def continues(self) -> bool:
        """Whether its last message is left open, which only engines render."""
        last = self.body["input"][-1] if isinstance(self.body.get("input"), list) else {}
        return bool(self.body.get("continue_final_message")) or last.get("status") == "in_progress"


def recorded(template: str) -> list[Recorded]:
    """All that was recorded under *template*."""
    rows = map(json.loads, (DATA / f"{template}.jsonl").read_text().splitlines())
    return [Recorded(Api(row["api"]), row["body"], row["token_ids"]) for row in rows]


def model_folder(folder: Path, template: str) -> Path:
    """A model's folder with *template*, made in *folder*."""
    made = folder / template
    made.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DATA / name, made)
    shutil.copy(DATA / f"{template}.jinja", made / "chat_template.jinja")
    return made


def request_of(api: Api, body: dict[str, Any]) -> InferenceRequest:
    """*body* as the router reads it."""
    return parse(api, json.dumps(body, ensure_ascii=False).encode(), [], TokenRatio(), ReaderSettings())


def tokens_of(encoder: Encoder | None, results: list[str] | None = None) -> RequestTokens:
    """Token ids by *encoder*; what came of each prompt is appended to *results*."""
    noted = results if results is not None else []
    return RequestTokens(
        encoder, block_size=16, on_result=lambda result, _: noted.append(result), on_compared=lambda _: None
    )


async def ids_of(encoder: Encoder, api: Api, body: dict[str, Any]) -> array[int] | None:
    """The ids of *body*'s first prompt by *encoder*, which has been started; compare them with the engine's."""
    return await tokens_of(encoder).of(request_of(api, body))
