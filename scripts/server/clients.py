"""Drives a running server with the openai, anthropic and ollama packages and checks what they make of its answers.

    python scripts/server/clients.py URL API_KEY real|random [PROCESS]

With a random model the wording means nothing; shapes, counts and constraints must hold all the same. If the server's process is
given, it is told to end at last.
"""

import json
import os
import signal
import sys
import traceback
import urllib.request

import anthropic
import ollama
import openai

URL, KEY, KIND = sys.argv[1], sys.argv[2], sys.argv[3]
REAL = KIND == "real"
MODEL = "judged"
CONTEXT = 2048 if REAL else 512

client = openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0)
claude = anthropic.Anthropic(base_url=URL, api_key=KEY, max_retries=0)
llama = ollama.Client(host=URL, headers={"Authorization": f"Bearer {KEY}"})

HELLO = [{"role": "user", "content": "Say hello in one short sentence."}]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "minimum": 0, "maximum": 120}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
WEATHER = {
    "name": "get_weather",
    "description": "Get the weather of a city",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 16}, "unit": {"enum": ["C", "F"]}},
        "required": ["city", "unit"],
        "additionalProperties": False,
    },
}
TOOLS = [{"type": "function", "function": WEATHER}]

checks = []


def check(function):
    checks.append(function)
    return function


def check_real(function):
    """A check whose prompts are too long for the tiny random model, which has 512 tokens of a byte each."""
    if REAL:
        checks.append(function)
    else:
        print(f"left    {function.__name__}: needs a real model")
    return function


def fits(text):
    value = json.loads(text)
    assert set(value) == {"name", "age"} and isinstance(value["name"], str) and 0 <= value["age"] <= 120, value


def is_call(arguments):
    value = json.loads(arguments) if isinstance(arguments, str) else arguments
    assert set(value) == {"city", "unit"} and value["unit"] in "CF", value


def raises(kind, work):
    try:
        work()
    except kind as error:
        return error
    raise AssertionError(f"{kind.__name__} was expected")


# --- OpenAI ------------------------------------------------------------------------------------------------------------


@check
def openai_models():
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).owned_by == "kiln"


@check
def openai_chat():
    reply = client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=24, temperature=0)
    choice = reply.choices[0]
    assert choice.message.role == "assistant" and choice.message.content, reply
    assert choice.finish_reason in ("stop", "length")
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens
    assert reply._request_id.startswith("req_")


@check
def openai_chat_stream_equals_whole():
    ask = dict(model=MODEL, messages=HELLO, max_tokens=24, temperature=0)
    whole = client.chat.completions.create(**ask)
    with client.chat.completions.stream(**ask, stream_options={"include_usage": True}) as stream:
        for _ in stream:
            pass
        # The final completion would be refused by the client where the limit ended a text.
        final = stream.current_completion_snapshot
    assert final.choices[0].message.content == whole.choices[0].message.content
    assert final.choices[0].message.role == "assistant", final.choices[0].message.role
    assert final.usage.completion_tokens == whole.usage.completion_tokens


@check
def openai_several_choices_streamed():
    ask = dict(model=MODEL, messages=HELLO, max_tokens=12, n=3, seed=5, temperature=1.2)
    whole = client.chat.completions.create(**ask)
    with client.chat.completions.stream(**ask) as stream:
        for _ in stream:
            pass
        # The final completion would be refused by the client where the limit ended a text.
        final = stream.current_completion_snapshot
    texts = [choice.message.content for choice in whole.choices]
    assert [choice.message.content for choice in final.choices] == texts
    assert len(set(texts)) > 1, texts


@check
def openai_logprobs():
    ask = dict(model=MODEL, messages=HELLO, max_tokens=8, temperature=0, logprobs=True, top_logprobs=4)
    reply = client.chat.completions.create(**ask)
    entries = reply.choices[0].logprobs.content
    assert entries and all(len(entry.top_logprobs) == 4 and entry.logprob <= 0 for entry in entries)
    text = b"".join(bytes(entry.bytes) for entry in entries).decode("utf-8", "replace")
    assert text == reply.choices[0].message.content, (text, reply.choices[0].message.content)
    streamed = [e for chunk in client.chat.completions.create(**ask, stream=True)
                for choice in chunk.choices if choice.logprobs for e in choice.logprobs.content]
    assert [e.token for e in streamed] == [e.token for e in entries]


@check
def openai_stop_and_bias():
    whole = client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=16, temperature=0).choices[0].message.content
    word = whole[4:6]
    reply = client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=16, temperature=0, stop=[word])
    assert reply.choices[0].message.content == whole[: whole.index(word)] and reply.choices[0].finish_reason == "stop"


@check
def openai_parse():
    import pydantic

    class Person(pydantic.BaseModel):
        model_config = pydantic.ConfigDict(extra="forbid")
        name: str = pydantic.Field(max_length=12)
        age: int = pydantic.Field(ge=0, le=120)

    ask = dict(model=MODEL, messages=[{"role": "user", "content": "Invent a person."}], temperature=0, max_tokens=200)
    reply = client.chat.completions.parse(**ask, response_format=Person)
    assert isinstance(reply.choices[0].message.parsed, Person), reply


@check
def openai_json_object_and_structured_outputs():
    ask = dict(model=MODEL, messages=[{"role": "user", "content": "yes or no?"}], max_tokens=300, temperature=0)
    picked = client.chat.completions.create(**ask, extra_body={"structured_outputs": {"choice": ["yes", "no"]}})
    assert picked.choices[0].message.content in ("yes", "no"), picked
    matched = client.chat.completions.create(**ask, extra_body={"structured_outputs": {"regex": "[a-c]{3}-[0-9]{2}"}})
    text = matched.choices[0].message.content
    assert len(text) == 6 and text[3] == "-" and text[4:].isdigit(), text
    gbnf = client.chat.completions.create(**ask, extra_body={"grammar": 'root ::= "left" | "right"'})
    assert gbnf.choices[0].message.content in ("left", "right"), gbnf
    bad = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object", "properties": {"a": {"type": "nonsense"}}}}}
    error = raises(openai.BadRequestError, lambda: client.chat.completions.create(**ask, response_format=bad))
    assert error.code == "invalid_json_schema", error.body


@check_real
def openai_forced_tool_call():
    ask = dict(model=MODEL, messages=[{"role": "user", "content": "Weather in Oslo?"}], tools=TOOLS, temperature=0, max_tokens=300)
    ask["tool_choice"] = {"type": "function", "function": {"name": "get_weather"}}
    ask["parallel_tool_calls"] = False
    reply = client.chat.completions.create(**ask)
    choice = reply.choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.content is None, reply
    (call,) = choice.message.tool_calls
    assert call.function.name == "get_weather" and call.id.startswith("call_")
    is_call(call.function.arguments)
    with client.chat.completions.stream(**ask) as stream:
        for _ in stream:
            pass
        streamed = stream.get_final_completion().choices[0].message.tool_calls[0]
    assert streamed.function.name == "get_weather", streamed
    assert streamed.function.arguments == call.function.arguments
    # The call and its answer go back.
    history = ask["messages"] + [choice.message.model_dump(exclude_none=True),
                                 {"role": "tool", "tool_call_id": call.id, "content": "12 C"}]
    after = client.chat.completions.create(model=MODEL, messages=history, tools=TOOLS, tool_choice="none", max_tokens=16)
    assert after.choices[0].message.content is not None


@check_real
def openai_tools_beside_a_shape():
    ask = dict(model=MODEL, messages=[{"role": "user", "content": "Weather in Oslo?"}], tools=TOOLS, temperature=0, max_tokens=300)
    format = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}}
    message = client.chat.completions.create(**ask, response_format=format, parallel_tool_calls=False).choices[0].message
    if message.tool_calls:
        is_call(message.tool_calls[0].function.arguments)
    else:
        fits(message.content)
    # A strict tool leaves the model free, but for the calls that it makes.
    strict = [{**tool, "function": {**tool["function"], "strict": True}} for tool in TOOLS]
    choice = client.chat.completions.create(**{**ask, "tools": strict, "max_tokens": 60}).choices[0]
    calls = choice.message.tool_calls or []
    # The last one may be cut short by the limit.
    for call in calls if choice.finish_reason == "tool_calls" else calls[:-1]:
        is_call(call.function.arguments)


@check
def openai_completions():
    ask = dict(model=MODEL, prompt="The capital of France is", temperature=0, max_tokens=8)
    whole = client.completions.create(**ask)
    assert whole.choices[0].text and whole.usage.completion_tokens <= 8
    if REAL:
        assert "Paris" in whole.choices[0].text, whole
    streamed = "".join(c.choices[0].text for c in client.completions.create(**ask, stream=True) if c.choices)
    assert streamed == whole.choices[0].text
    echo = client.completions.create(**{**ask, "max_tokens": 1}, echo=True, logprobs=1)
    assert echo.choices[0].text.startswith(ask["prompt"]), echo
    assert echo.choices[0].logprobs.token_logprobs[0] is None


@check_real
def openai_responses():
    ask = dict(model=MODEL, input="Say hello in one short sentence.", instructions="Be brief.", max_output_tokens=24, temperature=0)
    whole = client.responses.create(**ask)
    assert whole.output_text and whole.usage.output_tokens > 0, whole
    with client.responses.stream(**ask) as stream:
        events = list(stream)
    # The client's own final response is refused where the limit ended the text.
    assert events[0].type == "response.created" and events[-1].response.status == whole.status, events[-1]
    assert events[-1].response.output_text == whole.output_text, events[-1]
    schema = {"format": {"type": "json_schema", "name": "person", "schema": SCHEMA, "strict": True}}
    fits(client.responses.create(model=MODEL, input="Invent a person.", text=schema, max_output_tokens=200).output_text)
    tool = {"type": "function", "strict": True, **WEATHER}
    ask = dict(model=MODEL, input="Weather in Oslo?", tools=[tool], tool_choice="required", max_output_tokens=200,
               parallel_tool_calls=False, temperature=0)
    with client.responses.stream(**ask) as stream:
        for _ in stream:
            pass
        final = stream.get_final_response()
    (call,) = [item for item in final.output if item.type == "function_call"]
    is_call(call.arguments)
    back = [{"role": "user", "content": "Weather in Oslo?"}, call.model_dump(exclude_none=True, exclude={"parsed_arguments"}),
            {"type": "function_call_output", "call_id": call.call_id, "output": "12 C"}]
    assert client.responses.create(model=MODEL, input=back, max_output_tokens=16).status in ("completed", "incomplete")


@check
def openai_responses_with_probabilities():
    ask = dict(model=MODEL, input="Say hello.", temperature=0, max_output_tokens=12, top_logprobs=2,
               include=["message.output_text.logprobs", "reasoning.encrypted_content"])
    part = client.responses.create(**ask).output[-1].content[0]
    assert part.logprobs and all(len(entry.top_logprobs) == 2 for entry in part.logprobs), part
    deltas = [event for event in client.responses.create(**ask, stream=True) if event.type == "response.output_text.delta"]
    assert [entry.token for event in deltas for entry in event.logprobs] == [entry.token for entry in part.logprobs]


@check
def openai_errors():
    ask = dict(model=MODEL, messages=HELLO, max_tokens=4)
    assert raises(openai.NotFoundError, lambda: client.chat.completions.create(**{**ask, "model": "nothing"})).code == "model_not_found"
    assert raises(openai.BadRequestError, lambda: client.chat.completions.create(**{**ask, "n": 100})).param == "n"
    long = [{"role": "user", "content": "word " * 5000}]
    error = raises(openai.BadRequestError, lambda: client.chat.completions.create(**{**ask, "messages": long, "stream": True}))
    assert error.code == "context_length_exceeded", error.body
    stranger = openai.OpenAI(base_url=f"{URL}/v1", api_key="wrong", max_retries=0)
    raises(openai.AuthenticationError, lambda: stranger.models.list())


# --- Anthropic ---------------------------------------------------------------------------------------------------------


@check
def anthropic_messages():
    ask = dict(model=MODEL, max_tokens=24, system="Be brief.", messages=HELLO)
    whole = claude.messages.create(**ask, extra_body={"temperature": 0})
    assert whole.type == "message" and whole.content[0].type == "text" and whole.content[0].text, whole
    assert whole.stop_reason in ("end_turn", "max_tokens") and whole.usage.output_tokens > 0
    with claude.messages.stream(**ask, extra_body={"temperature": 0}) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole.content[0].text and final.stop_reason == whole.stop_reason, (text, whole)
    assert final.usage.output_tokens == whole.usage.output_tokens
    counted = claude.messages.count_tokens(model=MODEL, system="Be brief.", messages=HELLO).input_tokens
    assert counted == whole.usage.input_tokens + whole.usage.cache_read_input_tokens, (counted, whole.usage)


@check_real
def anthropic_tools():
    tool = {"name": "get_weather", "description": "Get the weather", "input_schema": WEATHER["parameters"]}
    ask = dict(model=MODEL, max_tokens=300, tools=[tool], messages=[{"role": "user", "content": "Weather in Oslo?"}],
               tool_choice={"type": "any", "disable_parallel_tool_use": True}, extra_body={"temperature": 0})
    whole = claude.messages.create(**ask)
    (use,) = [block for block in whole.content if block.type == "tool_use"]
    is_call(use.input)
    assert whole.stop_reason == "tool_use" and use.id.startswith("toolu_"), whole
    with claude.messages.stream(**ask) as stream:
        for _ in stream:
            pass
        final = stream.get_final_message()
    (again,) = [block for block in final.content if block.type == "tool_use"]
    assert again.input == use.input, (again, use)
    history = ask["messages"] + [{"role": "assistant", "content": [use.model_dump(exclude_none=True)]},
                                 {"role": "user", "content": [{"type": "tool_result", "tool_use_id": use.id, "content": "12 C"}]}]
    after = claude.messages.create(model=MODEL, max_tokens=16, tools=[tool], tool_choice={"type": "none"}, messages=history)
    assert after.role == "assistant"


@check
def anthropic_stop_and_errors():
    whole = claude.messages.create(model=MODEL, max_tokens=16, messages=HELLO, extra_body={"temperature": 0}).content[0].text
    word = whole[4:6]
    cut = claude.messages.create(model=MODEL, max_tokens=16, messages=HELLO, stop_sequences=[word], extra_body={"temperature": 0})
    assert cut.stop_reason == "stop_sequence" and cut.stop_sequence == word, cut
    long = [{"role": "user", "content": "word " * 5000}]
    error = raises(anthropic.BadRequestError, lambda: claude.messages.create(model=MODEL, max_tokens=4, messages=long))
    assert "prompt is too long" in str(error), error
    raises(anthropic.NotFoundError, lambda: claude.messages.create(model="nothing", max_tokens=4, messages=HELLO))


# --- Ollama ------------------------------------------------------------------------------------------------------------


@check
def ollama_chat():
    options = {"temperature": 0, "num_predict": 24}
    whole = llama.chat(model=MODEL, messages=HELLO, options=options)
    assert whole.message.content and whole.done and whole.eval_count > 0, whole
    pieces = list(llama.chat(model=MODEL, messages=HELLO, options=options, stream=True))
    assert "".join(piece.message.content or "" for piece in pieces) == whole.message.content
    assert pieces[-1].done and pieces[-1].done_reason in ("stop", "length")
    fits(llama.chat(model=MODEL, messages=HELLO, options={"num_predict": 200}, format=SCHEMA).message.content)
    told = llama.chat(model=MODEL, messages=HELLO, options=options, logprobs=True, top_logprobs=2)
    assert len(told.logprobs) == told.eval_count, told
    # Tokens of a random model are parts of characters, which make no text one by one.
    assert not REAL or "".join(entry.token for entry in told.logprobs) == told.message.content, told
    assert all(len(entry.top_logprobs) == 2 for entry in told.logprobs)


@check
def ollama_generate_and_models():
    options = {"temperature": 0, "num_predict": 8}
    whole = llama.generate(model=MODEL, prompt="The capital of France is", raw=True, options=options)
    assert whole.response, whole
    pieces = list(llama.generate(model=MODEL, prompt="The capital of France is", raw=True, options=options, stream=True))
    assert "".join(piece.response for piece in pieces) == whole.response
    assert [model.model for model in llama.list().models] == [MODEL]
    assert llama.ps().models[0].context_length == CONTEXT
    assert llama.show(MODEL).modelinfo["general.architecture"], "model_info is missing"
    raises(ollama.ResponseError, lambda: llama.chat(model="nothing", messages=HELLO))


# --- the rest ----------------------------------------------------------------------------------------------------------


@check
def metrics_are_readable():
    request = urllib.request.Request(f"{URL}/metrics", headers={"Authorization": f"Bearer {KEY}"})
    text = urllib.request.urlopen(request).read().decode()
    values = {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line and line[0] != "#"}
    total = sum(value for name, value in values.items() if name.startswith("vllm:generation_tokens_total"))
    assert total > 100, total


@check
def the_server_finishes_what_it_writes_before_it_ends():
    if len(sys.argv) < 5:
        return
    ask = dict(model=MODEL, messages=HELLO, max_tokens=64, temperature=0, stream=True, extra_body={"ignore_eos": True})
    stream = client.chat.completions.create(**ask)
    next(stream)
    os.kill(int(sys.argv[4]), signal.SIGTERM)
    assert [chunk.choices[0].finish_reason for chunk in stream][-1] == "length"


def main():
    failed = 0
    for function in checks:
        try:
            function()
            print(f"ok      {function.__name__}")
        except Exception:
            failed += 1
            print(f"FAILED  {function.__name__}")
            traceback.print_exc()
    print(f"{len(checks) - failed} of {len(checks)} passed: openai {openai.__version__}, anthropic {anthropic.__version__}, ollama")
    sys.exit(1 if failed else 0)


main()
