"""Uses a running server through one framework, as its users do: python scripts/test_frameworks.py NAME URL API_KEY

What a small model says means little; that calls come, shapes are kept, streams add up and errors are of the right kind must hold.
"""

import json
import os
import subprocess
import sys
import tempfile
import time

NAME, URL, KEY = sys.argv[1:4]
BASE, MODEL = f"{URL}/v1", "judged"
ASK = [{"role": "user", "content": "Say hello in one short sentence."}]
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "day": {"type": "integer", "minimum": 1, "maximum": 31}},
    "required": ["city", "day"],
    "additionalProperties": False,
}
TURNS = 10


def check_call(text):
    value = json.loads(text) if isinstance(text, str) else text
    assert set(value) == {"city", "day"} and 1 <= value["day"] <= 31, value


def person():
    import pydantic

    class Person(pydantic.BaseModel):
        model_config = pydantic.ConfigDict(extra="forbid")
        name: str = pydantic.Field(max_length=12)
        age: int = pydantic.Field(ge=0, le=120)

    return Person


def litellm():
    import litellm

    ask = dict(model=f"openai/{MODEL}", api_base=BASE, api_key=KEY, max_tokens=16, temperature=0)
    whole = litellm.completion(messages=ASK, **ask)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in litellm.completion(messages=ASK, stream=True, **ask))
    assert whole.choices[0].message.content == text and text, (whole, text)
    long = [{"role": "user", "content": "clay " * 6000}]
    try:
        litellm.completion(messages=long, **ask)
    except litellm.ContextWindowExceededError:
        return
    raise AssertionError("a prompt that is too long should be known as one")


def langchain():
    from langchain_openai import ChatOpenAI

    chat = ChatOpenAI(base_url=BASE, api_key=KEY, model=MODEL, temperature=0, max_tokens=60)
    whole = chat.invoke("Say hello.")
    assert whole.content and whole.usage_metadata["output_tokens"] > 0, whole
    assert "".join(chunk.content for chunk in chat.stream("Say hello.")) == whole.content
    found = chat.with_structured_output(person(), method="json_schema").invoke("Invent a person.")
    assert 0 <= found.age <= 120, found
    tool = {"type": "function", "function": {"name": "weather", "description": "The weather", "parameters": PARAMETERS}}
    called = chat.bind_tools([tool], tool_choice="weather").invoke("The weather in Oslo?")
    check_call(called.tool_calls[0]["args"])


def instructor():
    import instructor as made
    import openai

    client = made.from_openai(openai.OpenAI(base_url=BASE, api_key=KEY), mode=made.Mode.JSON_SCHEMA)
    found = client.chat.completions.create(model=MODEL, response_model=person(), messages=[{"role": "user", "content": "Invent a person."}], max_tokens=80)
    assert 0 <= found.age <= 120, found


def pydantic_ai():
    from pydantic_ai import Agent, NativeOutput
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=BASE, api_key=KEY))
    settings = {"max_tokens": 80, "temperature": 0.0}
    assert Agent(model, model_settings=settings).run_sync("Say hello.").output
    found = Agent(model, output_type=NativeOutput(person()), model_settings=settings).run_sync("Invent a person.").output
    assert 0 <= found.age <= 120, found


def agents():
    import agents as made
    import openai

    client = openai.AsyncOpenAI(base_url=BASE, api_key=KEY)
    seen = []

    @made.function_tool
    def weather(city: str) -> str:
        """The weather of a city."""
        seen.append(city)
        return "rain"

    settings = made.ModelSettings(max_tokens=80, temperature=0, tool_choice="required", parallel_tool_calls=False)
    for kind in (made.OpenAIChatCompletionsModel, made.OpenAIResponsesModel):
        before = len(seen)
        agent = made.Agent(name="a", model=kind(model=MODEL, openai_client=client), tools=[weather], model_settings=settings)
        result = made.Runner.run_sync(agent, "The weather in Oslo?", max_turns=6)
        assert len(seen) > before and isinstance(result.final_output, str), result


def llm():
    with tempfile.TemporaryDirectory() as folder:
        with open(os.path.join(folder, "extra-openai-models.yaml"), "w", encoding="utf-8") as file:
            file.write(f"- model_id: {MODEL}\n  model_name: {MODEL}\n  api_base: {BASE}\n  api_key_name: kiln\n")
        environment = {**os.environ, "LLM_USER_PATH": folder}
        command = ["llm", "-m", MODEL, "--key", KEY, "-o", "max_tokens", "16", "Say hello."]
        for more in ([], ["--no-stream"]):
            done = subprocess.run(command + more, env=environment, capture_output=True, text=True, timeout=120, check=False)
            assert done.returncode == 0 and done.stdout.strip(), (done.stdout, done.stderr)


def turns():
    """The turns of an agent; says how long each took, so that a slow one can be told from one that hangs."""
    for turn in range(TURNS):
        began = time.monotonic()
        yield turn
        print(f"turn {turn}: {time.monotonic() - began:.1f} s", flush=True)


def loop_openai():
    import openai

    client = openai.OpenAI(base_url=BASE, api_key=KEY)
    tools = [{"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}]
    messages, cached = [{"role": "user", "content": "Find the driest city."}], []
    for turn in turns():
        reply = client.chat.completions.create(model=MODEL, messages=messages, tools=tools, tool_choice="required", parallel_tool_calls=False, max_tokens=80)
        message = reply.choices[0].message
        check_call(message.tool_calls[0].function.arguments)
        cached.append(reply.usage.prompt_tokens_details.cached_tokens)
        messages += [message.model_dump(exclude_none=True), {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": f"{turn} mm"}]
    assert cached[-1] > cached[1] > 0, f"each turn should find the one before it: {cached}"
    last = client.chat.completions.create(model=MODEL, messages=messages, tools=tools, tool_choice="none", max_tokens=16)
    assert last.choices[0].message.tool_calls is None


def loop_responses():
    import openai

    client = openai.OpenAI(base_url=BASE, api_key=KEY)
    tools = [{"type": "function", "name": "weather", "parameters": PARAMETERS, "strict": True}]
    items = [{"role": "user", "content": "Find the driest city."}]
    for turn in turns():
        reply = client.responses.create(model=MODEL, input=items, tools=tools, tool_choice="required", parallel_tool_calls=False, max_output_tokens=80)
        call = next(item for item in reply.output if item.type == "function_call")
        check_call(call.arguments)
        items += [item.model_dump(exclude_none=True) for item in reply.output]
        items.append({"type": "function_call_output", "call_id": call.call_id, "output": f"{turn} mm"})


def loop_anthropic():
    import anthropic

    client = anthropic.Anthropic(base_url=URL, api_key=KEY)
    tools = [{"name": "weather", "input_schema": PARAMETERS}]
    messages = [{"role": "user", "content": "Find the driest city."}]
    for turn in turns():
        choice = {"type": "any", "disable_parallel_tool_use": True}
        reply = client.messages.create(model=MODEL, messages=messages, tools=tools, tool_choice=choice, max_tokens=80)
        call = next(block for block in reply.content if block.type == "tool_use")
        assert reply.stop_reason == "tool_use", reply
        check_call(call.input)
        messages.append({"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in reply.content]})
        messages.append({"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": f"{turn} mm"}]})


PARTS = [litellm, langchain, instructor, pydantic_ai, agents, llm, loop_openai, loop_responses, loop_anthropic]
{part.__name__: part for part in PARTS}[NAME]()
