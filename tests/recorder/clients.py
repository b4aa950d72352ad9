"""A conversation by each published client: a call with tools, a streamed one, and one with the result of the tool.

``python clients.py URL ...`` runs in a process of its own, where requirements-clients.txt is installed. It prints JSON:
for each URL what each client saw, an answer as its text and its calls. ``{}`` in a URL becomes the client's name.
No tool is strict: vLLM then wants a package for structured outputs that the tests' environment lacks.
"""

import json
import sys
from collections.abc import Iterator
from typing import Any

SYSTEM, QUESTION = "You answer arithmetic questions with the calculator.", "What is 12 * 7?"
MESSAGES = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}]
SCHEMA = {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]}
FUNCTION = {"name": "calculator", "description": "Evaluates one arithmetic expression.", "parameters": SCHEMA}
TOOL = {"type": "function", "function": FUNCTION}
MODEL, KEY, N_TOKENS = "demo", "none", 48

Answer = tuple[str, list[tuple[str, str]]]
"""The text of an answer, and the name and arguments of each call."""


def calculator(expression: str) -> str:
    """Evaluates one arithmetic expression.

    Args:
        expression: What to evaluate.
    """
    return "84"


def answer(text: str | None, calls: Any = ()) -> Answer:
    return text or "", [(call.function.name, call.function.arguments) for call in calls or ()]


def by_openai(url: str) -> Iterator[Answer]:
    from openai import OpenAI

    client, options = OpenAI(base_url=url, api_key=KEY), {"temperature": 0, "max_tokens": N_TOKENS}
    reply = client.chat.completions.create(model=MODEL, messages=MESSAGES, tools=[TOOL], **options).choices[0].message
    yield answer(reply.content, reply.tool_calls)
    with client.chat.completions.stream(model=MODEL, messages=MESSAGES, tools=[TOOL], **options) as stream:
        streamed = stream.get_final_completion().choices[0].message
    yield answer(streamed.content, streamed.tool_calls)
    result = {"role": "tool", "tool_call_id": reply.tool_calls[0].id, "content": calculator("")}
    messages = [*MESSAGES, reply.model_dump(exclude_none=True), result]
    last = client.chat.completions.create(model=MODEL, messages=messages, tools=[TOOL], **options).choices[0].message
    yield answer(last.content, last.tool_calls)


def by_anthropic(url: str) -> Iterator[Answer]:
    from anthropic import Anthropic

    def said(message: Any) -> Answer:
        calls = [(block.name, json.dumps(block.input)) for block in message.content if block.type == "tool_use"]
        return "".join(block.text for block in message.content if block.type == "text"), calls

    client = Anthropic(base_url=url.removesuffix("/v1"), api_key=KEY)
    tool = {"name": FUNCTION["name"], "description": FUNCTION["description"], "input_schema": SCHEMA}
    options = {"model": MODEL, "system": SYSTEM, "tools": [tool], "max_tokens": N_TOKENS,
               "extra_body": {"temperature": 0}}
    question = {"role": "user", "content": QUESTION}
    reply = client.messages.create(messages=[question], **options)
    yield said(reply)
    with client.messages.stream(messages=[question], **options) as stream:
        yield said(stream.get_final_message())
    call = next(block for block in reply.content if block.type == "tool_use")
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": calculator("")}]}
    blocks = [block.model_dump(exclude_none=True) for block in reply.content]
    yield said(client.messages.create(messages=[question, {"role": "assistant", "content": blocks}, result], **options))


def by_litellm(url: str) -> Iterator[Answer]:
    import litellm

    def said(response: Any) -> Answer:
        return answer(response.choices[0].message.content, response.choices[0].message.tool_calls)

    options = {"model": f"hosted_vllm/{MODEL}", "api_base": url, "api_key": KEY, "tools": [TOOL], "temperature": 0,
               "max_tokens": N_TOKENS}
    reply = litellm.completion(messages=MESSAGES, **options)
    yield said(reply)
    yield said(litellm.stream_chunk_builder(list(litellm.completion(messages=MESSAGES, stream=True, **options))))
    message = reply.choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": calculator("")}
    yield said(litellm.completion(messages=[*MESSAGES, message.model_dump(exclude_none=True), result], **options))


def by_smolagents(url: str) -> Iterator[Answer]:
    from smolagents import OpenAIModel, tool
    from smolagents.models import agglomerate_stream_deltas

    model = OpenAIModel(MODEL, api_base=url, api_key=KEY, temperature=0, max_tokens=N_TOKENS, tool_choice="auto")
    options: dict[str, Any] = {"tools_to_call_from": [tool(calculator)]}
    reply = model.generate(MESSAGES, **options)
    yield answer(reply.content, reply.tool_calls)
    streamed = agglomerate_stream_deltas(list(model.generate_stream(MESSAGES, **options)))
    yield answer(streamed.content, streamed.tool_calls)
    # Its agents tell the model of a call and of its result as text.
    told = [{"role": role, "content": [{"type": "text", "text": text}]} for role, text in (
        ("tool-call", f"Calling tools:\n{answer(None, reply.tool_calls)[1]}"), ("tool-response", calculator("")))]
    last = model.generate([*MESSAGES, *told], **options)
    yield answer(last.content, last.tool_calls)


def by_langgraph(url: str) -> Iterator[Answer]:
    from langchain_core.messages import AIMessageChunk
    from langchain_openai import ChatOpenAI
    from langgraph.prebuilt import create_react_agent

    def said(message: Any) -> Answer:
        return message.text, [(call["name"], json.dumps(call["args"])) for call in message.tool_calls]

    agent = create_react_agent(
        ChatOpenAI(model=MODEL, base_url=url, api_key=KEY, temperature=0, max_completion_tokens=N_TOKENS),
        [calculator], prompt=SYSTEM,
    )
    question = {"messages": [{"role": "user", "content": QUESTION}]}
    yield from (said(one) for one in agent.invoke(question)["messages"] if one.type == "ai")
    pieces: dict[str, Any] = {}
    for piece, _ in agent.stream(question, stream_mode="messages"):
        if isinstance(piece, AIMessageChunk):
            pieces[piece.id] = pieces[piece.id] + piece if piece.id in pieces else piece
    yield from map(said, pieces.values())


def by_agents(url: str) -> Iterator[Answer]:
    """openai-agents, which speaks Responses."""
    import asyncio

    from agents import Agent, ModelSettings, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
    from openai import AsyncOpenAI

    def said(found: Any) -> Iterator[Answer]:
        for response in found.raw_responses:
            texts = [part.text for item in response.output if item.type == "message" for part in item.content]
            calls = [(item.name, item.arguments) for item in response.output if item.type == "function_call"]
            yield "".join(texts), calls

    async def both() -> list[Answer]:
        model = OpenAIResponsesModel(MODEL, AsyncOpenAI(base_url=url, api_key=KEY))
        settings = ModelSettings(temperature=0, max_tokens=N_TOKENS)
        agent = Agent("a", instructions=SYSTEM, model=model, model_settings=settings, tools=[
            function_tool(calculator, strict_mode=False)])
        found = list(said(await Runner.run(agent, QUESTION)))
        streamed = Runner.run_streamed(agent, QUESTION)
        async for _ in streamed.stream_events():
            pass
        return [*found, *said(streamed)]

    set_tracing_disabled(True)
    yield from asyncio.run(both())


def by_pydantic_ai(url: str) -> Iterator[Answer]:
    from pydantic_ai import Agent, Tool
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    def said(messages: Any) -> Iterator[Answer]:
        for message in messages:
            if message.kind == "response":
                texts = [part.content for part in message.parts if part.part_kind == "text"]
                calls = [part for part in message.parts if part.part_kind == "tool-call"]
                yield "".join(texts), [(call.tool_name, call.args_as_json_str()) for call in calls]

    model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=url, api_key=KEY))
    agent = Agent(model, instructions=SYSTEM, tools=[Tool(calculator, strict=False)],
                  model_settings={"temperature": 0, "max_tokens": N_TOKENS})
    yield from said(agent.run_sync(QUESTION).all_messages())
    with agent.run_stream_sync(QUESTION) as streamed:
        streamed.get_output()
        yield from said(streamed.all_messages())


CLIENTS = {
    "openai": by_openai, "anthropic": by_anthropic, "litellm": by_litellm, "langgraph": by_langgraph,
    "openai-agents": by_agents, "pydantic-ai": by_pydantic_ai, "smolagents": by_smolagents,
}

if __name__ == "__main__":
    seen = {url: {name: list(talk(url.replace("{}", name))) for name, talk in CLIENTS.items()} for url in sys.argv[1:]}
    print(json.dumps(seen))
