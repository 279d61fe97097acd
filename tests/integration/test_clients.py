"""The official clients of OpenAI and Anthropic against emulated engines behind the router: a table of calls."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import pytest
import pytest_asyncio

from smetric.app import Application
from smetric.config.settings import Admin, InstanceSettings, Listen, Settings
from smetric.lab.emulator.fleet import EmulatedFleet
from smetric.lab.emulator.instance import EmulatedSettings
from smetric.lab.engine import EngineConfig
from tests.fakes import listening, until

openai: Any = pytest.importorskip("openai")
anthropic: Any = pytest.importorskip("anthropic")

pytestmark = pytest.mark.asyncio(loop_scope="module")

HELLO = [{"role": "user", "content": "Hello"}]
SCHEMA = {
    "type": "object",
    "properties": {"path": {"type": "string"}, "lines": {"type": "integer"}},
    "required": ["path", "lines"],
}
CHAT_TOOL = {"type": "function", "function": {"name": "read", "description": "Read a file.", "parameters": SCHEMA}}
RESPONSE_TOOL = {"type": "function", "name": "read", "description": "Read a file.", "parameters": SCHEMA}
MESSAGE_TOOL = {"name": "read", "description": "Read a file.", "input_schema": SCHEMA}
AUDIO = ("speech.wav", b"RIFF\0\0\0\0WAVE" * 100, "audio/wav")


@dataclass(frozen=True)
class Site:
    """The clients, and the router between them and the engines."""

    openai: Any
    anthropic: Any
    application: Application


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def site() -> AsyncIterator[Site]:
    emulated = EmulatedSettings(model="m", engine=EngineConfig(blocks=4096, max_model_len=8192), time_scale=20.0)
    async with EmulatedFleet(2, emulated) as fleet:
        instances = tuple(InstanceSettings(id=f"e{n}", url=url) for n, url in enumerate(fleet.urls))
        settings = Settings(listen=Listen(port=0), admin=Admin(port=0), instances=instances)
        application = Application(settings, environ={})
        async with listening(application.data_app()) as port:
            await until(lambda: application.is_ready)
            url, options = port.url, {"api_key": "a-key", "max_retries": 0, "timeout": 20.0}
            async with (
                openai.AsyncOpenAI(base_url=f"{url}/v1", **options) as one,
                anthropic.AsyncAnthropic(base_url=url, **options) as other,
            ):
                yield Site(one, other, application)


#: Calls by name; each returns whether the answer is right.
CALLS: dict[str, Callable[[Site], Awaitable[object]]] = {}


def call(function: Callable[[Site], Awaitable[object]]) -> Callable[[Site], Awaitable[object]]:
    CALLS[function.__name__] = function
    return function


async def fails(made: Awaitable[Any], error: type[Exception]) -> bool:
    """Whether *made* fails with *error*."""
    try:
        await made
    except error:
        return True
    return False


def is_call(arguments: str) -> bool:
    """Whether the arguments of a tool call fit `SCHEMA`."""
    given = json.loads(arguments)
    return given.keys() == {"path", "lines"} and bool(given["path"]) and given["lines"] == 0


# Chat completions


def chat(site: Site, **more: Any) -> Any:
    return site.openai.chat.completions.create(**{"model": "m", "messages": HELLO, "max_tokens": 8, **more})


@call
async def chat_stream(site: Site) -> object:
    chunks = [chunk async for chunk in await chat(site, stream=True)]
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks) and chunks[-1].choices[0].finish_reason


@call
async def chat_stream_with_usage(site: Site) -> object:
    chunks = [chunk async for chunk in await chat(site, stream=True, stream_options={"include_usage": True})]
    return chunks[-1].usage.completion_tokens == 8


@call
async def chat_stream_left_early(site: Site) -> object:
    async with await chat(site, stream=True, max_tokens=4000) as stream:
        async for chunk in stream:
            return chunk.choices[0].delta.role == "assistant"
    return False


@call
async def chat_whose_next_turn_returns(site: Site) -> object:
    long = [{"role": "user", "content": "word " * 600}]
    first = await site.openai.chat.completions.with_raw_response.create(model="m", messages=long, max_tokens=8)
    reply = {"role": "assistant", "content": first.parse().choices[0].message.content}
    turn = [*long, reply, {"role": "user", "content": "And then?"}]
    second = await site.openai.chat.completions.with_raw_response.create(model="m", messages=turn, max_tokens=8)
    at = [answer.headers["x-smetric-instance"] for answer in (first, second)]
    return at[0] == at[1] and second.parse().usage.prompt_tokens_details.cached_tokens > 0


@call
async def chat_tool(site: Site) -> object:
    choice = (await chat(site, tools=[CHAT_TOOL], tool_choice="required", max_tokens=None)).choices[0]
    return choice.finish_reason == "tool_calls" and is_call(choice.message.tool_calls[0].function.arguments)


@call
async def chat_tool_stream(site: Site) -> object:
    name, arguments = "", ""
    async for chunk in await chat(site, tools=[CHAT_TOOL], tool_choice="required", stream=True):
        for part in chunk.choices[0].delta.tool_calls or ():
            name += part.function.name or ""
            arguments += part.function.arguments
    return name == "read" and is_call(arguments)


@call
async def chat_after_a_tool(site: Site) -> object:
    asked = (await chat(site, tools=[CHAT_TOOL], tool_choice="required")).choices[0].message
    result = {"role": "tool", "tool_call_id": asked.tool_calls[0].id, "content": "Buy milk."}
    answer = await chat(site, messages=[*HELLO, asked.model_dump(exclude_none=True), result], tools=[CHAT_TOOL])
    return answer.choices[0].message.content


# Completions


def complete(site: Site, prompt: Any = "Once", **more: Any) -> Any:
    return site.openai.completions.create(**{"model": "m", "prompt": prompt, "max_tokens": 8, **more})


@call
async def completion_stream(site: Site) -> object:
    return "".join([chunk.choices[0].text async for chunk in await complete(site, stream=True)])


# Responses


def respond(site: Site, **more: Any) -> Any:
    return site.openai.responses.create(**{"model": "m", "input": "Hello", "max_output_tokens": 8, **more})


@call
async def response_stream(site: Site) -> object:
    events = [event async for event in await respond(site, stream=True)]
    return events[-1].type == "response.completed" and events[-1].response.usage.output_tokens == 8


@call
async def response_tool(site: Site) -> object:
    (item,) = (await respond(site, tools=[RESPONSE_TOOL], tool_choice="required")).output
    return item.type == "function_call" and is_call(item.arguments)


@call
async def response_tool_stream(site: Site) -> object:
    named = {"type": "function", "name": "read"}
    events = [event async for event in await respond(site, tools=[RESPONSE_TOOL], tool_choice=named, stream=True)]
    (done,) = [event for event in events if event.type == "response.function_call_arguments.done"]
    return (
        is_call(done.arguments)
        and "".join(event.delta for event in events if event.type == "response.function_call_arguments.delta")
        == done.arguments
    )


@call
async def response_that_follows_another(site: Site) -> object:
    first = await respond(site, input="word " * 600)
    second = await respond(site, input="And then?", previous_response_id=first.id)
    return second.usage.input_tokens > first.usage.input_tokens and second.usage.input_tokens_details.cached_tokens > 0


@call
async def response_that_follows_a_tool(site: Site) -> object:
    first = await respond(site, tools=[RESPONSE_TOOL], tool_choice="required")
    output = {"type": "function_call_output", "call_id": first.output[0].call_id, "output": "Buy milk."}
    return (await respond(site, input=[output], previous_response_id=first.id)).output_text


@call
async def response_read_again(site: Site) -> object:
    made = await respond(site)
    return (await site.openai.responses.retrieve(made.id)).output_text == made.output_text


@call
async def response_that_is_not_stored(site: Site) -> object:
    made = await respond(site, store=False)
    return await fails(site.openai.responses.retrieve(made.id), openai.NotFoundError)


@call
async def response_in_the_background(site: Site) -> object:
    made = await respond(site, background=True)
    first = made.status
    while made.status in ("queued", "in_progress"):
        made = await site.openai.responses.retrieve(made.id)
    return first == "queued" and made.output_text


@call
async def response_in_the_background_as_a_stream_that_is_resumed(site: Site) -> object:
    async with await respond(site, background=True, stream=True, max_output_tokens=400) as stream:
        async for event in stream:
            if event.type == "response.in_progress":
                break
    rest = [each async for each in await site.openai.responses.retrieve(
        event.response.id, stream=True, starting_after=event.sequence_number)]  # fmt: skip
    numbers = [each.sequence_number for each in rest]
    return numbers == list(range(event.sequence_number + 1, numbers[-1] + 1)) and rest[-1].type == "response.completed"


@call
async def response_that_is_cancelled(site: Site) -> object:
    """Only one in the background can be."""
    made = await respond(site, background=True, max_output_tokens=4000)
    is_cancelled = (await site.openai.responses.cancel(made.id)).status == "cancelled"
    over = site.openai.responses.cancel((await respond(site)).id)
    return is_cancelled and await fails(over, openai.BadRequestError)


# Embeddings, models and uploads


def embed(site: Site, **more: Any) -> Any:
    return site.openai.embeddings.create(**{"model": "m", "input": "Hello", **more})


@call
async def embedding_plain(site: Site) -> object:
    """The client asks for base64 by itself."""
    vector = (await embed(site)).data[0].embedding
    return len(vector) == 64 and abs(sum(number * number for number in vector) - 1) < 1e-6


@call
async def embedding_of_several_texts(site: Site) -> object:
    made = await embed(site, input=["a", "b", "a"], encoding_format="float", dimensions=8)
    one, two, three = (item.embedding for item in made.data)
    return one == three != two and len(one) == 8


@call
async def models_listed(site: Site) -> object:
    return [model.id async for model in await site.openai.models.list()] == ["m"]


# Messages


def message(site: Site, **more: Any) -> Any:
    return site.anthropic.messages.create(**{"model": "m", "messages": HELLO, "max_tokens": 8, **more})


@call
async def message_stream(site: Site) -> object:
    kinds = [event.type async for event in await message(site, stream=True)]
    return kinds[0] == "message_start" and kinds[-1] == "message_stop"


@call
async def message_stream_gathered(site: Site) -> object:
    async with site.anthropic.messages.stream(model="m", messages=HELLO, max_tokens=8) as stream:
        text = "".join([part async for part in stream.text_stream])
        return text and (await stream.get_final_message()).usage.output_tokens == 8


@call
async def message_stream_left_early(site: Site) -> object:
    async with await message(site, stream=True, max_tokens=4000) as stream:
        async for event in stream:
            return event.type == "message_start"
    return False


@call
async def message_tool(site: Site) -> object:
    made = await message(site, tools=[MESSAGE_TOOL], tool_choice={"type": "any"}, max_tokens=2000)
    return made.stop_reason == "tool_use" and made.content[0].input["lines"] == 0


@call
async def message_tool_stream(site: Site) -> object:
    named = {"type": "tool", "name": "read"}
    async with site.anthropic.messages.stream(
        model="m", messages=HELLO, max_tokens=2000, tools=[MESSAGE_TOOL], tool_choice=named
    ) as stream:
        (block,) = (await stream.get_final_message()).content
    return block.type == "tool_use" and block.input["path"] and block.input["lines"] == 0


@call
async def message_after_a_tool(site: Site) -> object:
    asked = await message(site, tools=[MESSAGE_TOOL], tool_choice={"type": "any"})
    use = asked.content[0].model_dump(include={"type", "id", "name", "input"})
    result = {"type": "tool_result", "tool_use_id": use["id"], "content": "Buy milk."}
    turn = [*HELLO, {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    return (await message(site, messages=turn, tools=[MESSAGE_TOOL])).content[0].text


# Calls of one line


def upload(site: Site, model: str) -> Any:
    return site.openai.audio.transcriptions.create(model=model, file=AUDIO)


NAMED = {"type": "function", "function": {"name": "read"}}
#: Calls with the check of their answer.
ANSWERED: dict[str, tuple[Callable[[Site], Any], Callable[[Any], object]]] = {
    "chat": (chat, lambda made: made.choices[0].message.content and made.usage.completion_tokens == 8),
    "several choices": (
        lambda site: chat(site, n=3),
        lambda made: len({one.message.content for one in made.choices}) == 3,
    ),
    "a tool by its name": (
        lambda site: chat(site, tools=[CHAT_TOOL], tool_choice=NAMED),
        lambda made: made.choices[0].message.tool_calls[0].function.name == "read",
    ),
    "completion": (complete, lambda made: made.choices[0].text),
    "token ids": (lambda site: complete(site, [1, 2, 3]), lambda made: made.usage.prompt_tokens == 3),
    "several prompts": (lambda site: complete(site, ["Once", "Twice"]), lambda made: len(made.choices) == 2),
    "response": (respond, lambda made: made.output_text),
    "model": (lambda site: site.openai.models.retrieve("m"), lambda made: made.id == "m"),
    "transcription": (lambda site: upload(site, "m"), lambda made: made.text),
    "message": (lambda site: message(site, system="Be brief."), lambda made: made.stop_reason == "max_tokens"),
    "count of tokens": (
        lambda site: site.anthropic.messages.count_tokens(model="m", messages=HELLO),
        lambda made: made.input_tokens > 0,
    ),
}
#: Calls with the error that they end in.
REFUSED: dict[str, tuple[Callable[[Site], Any], type[Exception]]] = {
    "chat, unknown model": (lambda site: chat(site, model="other"), openai.NotFoundError),
    "chat without messages": (lambda site: chat(site, messages=[]), openai.BadRequestError),
    "chat, too long": (lambda site: chat(site, max_tokens=100_000), openai.BadRequestError),
    "stream, bad value": (lambda site: chat(site, stream=True, temperature=-1), openai.BadRequestError),
    "no prompt": (lambda site: complete(site, []), openai.BadRequestError),
    "unknown previous": (lambda site: respond(site, previous_response_id="resp_none"), openai.NotFoundError),
    "unknown response": (lambda site: site.openai.responses.retrieve("resp_none"), openai.NotFoundError),
    "nothing to embed": (lambda site: embed(site, input=[]), openai.BadRequestError),
    "unknown model": (lambda site: site.openai.models.retrieve("other"), openai.NotFoundError),
    "upload, unknown model": (lambda site: upload(site, "other"), openai.NotFoundError),
    "message, unknown model": (lambda site: message(site, model="other"), anthropic.NotFoundError),
    "message, too long": (lambda site: message(site, max_tokens=100_000), anthropic.BadRequestError),
}


@pytest.mark.parametrize("name", [*CALLS, *ANSWERED, *REFUSED])
async def test_official_client_is_served(site: Site, name: str) -> None:
    if name in CALLS:
        assert await CALLS[name](site)
    elif name in ANSWERED:
        made, is_right = ANSWERED[name]
        assert is_right(await made(site))
    else:
        made, error = REFUSED[name]
        assert await fails(made(site), error)
    await until(lambda: all(instance.own == 0 for instance in site.application.fleet.instances))


async def test_streams_read_to_their_end_count_as_served(site: Site) -> None:
    """Clients close a stream at its end mark, some before the last chunk: that is no disconnect."""
    log = site.application.telemetry.decisions
    for _ in range(10):
        await chat_stream(site)
        await message_stream(site)
        await response_stream(site)
    await until(lambda: all(record.duration_s is not None for record in log.recent(30)))
    assert [record.status for record in log.recent(30)] == [200] * 30
