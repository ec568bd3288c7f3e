"""Uses a running server through one framework, as its users do: python scripts/server/frameworks.py NAME URL API_KEY

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


def responses_state():
    """Each turn sends its own words alone; the server knows the rest."""
    import openai

    client = openai.OpenAI(base_url=BASE, api_key=KEY)
    ask = dict(model=MODEL, max_output_tokens=12, temperature=0)
    first = client.responses.create(input="My name is Ada.", **ask)
    second = client.responses.create(input="What is my name?", previous_response_id=first.id, **ask)
    assert second.previous_response_id == first.id and second.usage.input_tokens > first.usage.input_tokens, second
    # Its end may be `response.incomplete`, which the client's own helper does not take.
    third = list(client.responses.create(input="Again?", previous_response_id=second.id, stream=True, **ask))[-1].response
    assert third.usage.input_tokens > second.usage.input_tokens, third
    assert client.responses.retrieve(third.id).output_text == third.output_text
    items = list(client.responses.input_items.list(third.id, order="asc"))
    assert [getattr(item, "role", None) for item in items] == ["user", "assistant", "user", "assistant", "user"], items
    client.responses.delete(first.id)
    for gone in (lambda: client.responses.retrieve(first.id), lambda: client.responses.create(input="x", previous_response_id=second.id, **ask)):
        try:
            gone()
        except (openai.NotFoundError, openai.BadRequestError):
            continue
        raise AssertionError("a response that was deleted is gone")
    apart = client.responses.create(input="Hello", store=False, **ask)
    try:
        client.responses.retrieve(apart.id)
    except openai.NotFoundError:
        return
    raise AssertionError("a response that was not to be stored is not there")


def llama_index():
    """As it comes: the class asks the server for its context and sends that back."""
    from llama_index.core.llms import ChatMessage
    from llama_index.llms.ollama import Ollama

    made = Ollama(model=MODEL, base_url=URL, request_timeout=300, additional_kwargs={"num_predict": 16, "temperature": 0})
    whole = made.chat([ChatMessage(role="user", content="Say hello.")])
    assert whole.message.content, whole
    streamed = [piece.delta or "" for piece in made.stream_chat([ChatMessage(role="user", content="Say hello.")])]
    assert "".join(streamed) == whole.message.content, streamed
    assert made.complete("Once upon a time").text
    large = Ollama(model=MODEL, base_url=URL, request_timeout=300, context_window=32768, additional_kwargs={"num_predict": 4})
    assert large.complete("Hello").text


def lm_eval():
    """Probabilities of a task's answers, with the server's own tokenizer."""
    import lm_eval as made
    from lm_eval.tasks import TaskManager

    os.environ["OPENAI_API_KEY"] = KEY
    with tempfile.TemporaryDirectory() as folder:
        rows = [
            {"question": "Question: What color is the sky on a clear day?\nAnswer:", "choices": ["blue", "qzxv wkj"], "answer": 0},
            {"question": "Question: How many legs has a dog?\nAnswer:", "choices": ["grtx plmv", "four"], "answer": 1},
            {"question": "Question: What do cows drink?\nAnswer:", "choices": ["water", "xkcd qwfp"], "answer": 0},
        ]
        with open(os.path.join(folder, "rows.jsonl"), "w", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
        shared = f"dataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {folder}/rows.jsonl\ntest_split: test\ndoc_to_text: '{{{{question}}}}'\n"
        with open(os.path.join(folder, "choice.yaml"), "w", encoding="utf-8") as file:
            file.write(f"task: kiln_choice\n{shared}output_type: multiple_choice\ndoc_to_choice: '{{{{choices}}}}'\ndoc_to_target: answer\nmetric_list:\n  - metric: acc\n")
        with open(os.path.join(folder, "write.yaml"), "w", encoding="utf-8") as file:
            file.write(
                f"task: kiln_write\n{shared}output_type: generate_until\ndoc_to_target: '{{{{choices[answer]}}}}'\n"
                "generation_kwargs:\n  max_gen_toks: 8\n  until: ['\\n']\nmetric_list:\n  - metric: exact_match\n"
            )
        arguments = dict(base_url=f"{BASE}/completions", model=MODEL, tokenizer_backend="remote", auth_token=KEY, max_length=1024, num_concurrent=1)
        found = made.simple_evaluate(
            model="local-completions", model_args=arguments, tasks=["kiln_choice", "kiln_write"], task_manager=TaskManager(include_path=folder), bootstrap_iters=0
        )
        accuracy = found["results"]["kiln_choice"]["acc,none"]
        assert accuracy == 1.0, f"words should be likelier than letters: {found['results']}"
        assert "kiln_write" in found["results"], found["results"]


def aider():
    """One edit asked for, over Ollama's API and its defaults; what a small model makes of it means nothing."""
    with tempfile.TemporaryDirectory() as folder:
        with open(os.path.join(folder, "hello.py"), "w", encoding="utf-8") as file:
            file.write("print('hello')\n")
        environment = {**os.environ, "OLLAMA_API_BASE": URL, "OLLAMA_API_KEY": KEY, "HOME": folder}
        command = ["aider", "--model", f"ollama_chat/{MODEL}", "--edit-format", "whole", "--map-tokens", "0", "--no-git", "--yes-always", "--no-pretty"]
        command += ["--no-check-update", "--no-show-model-warnings", "--no-analytics", "--no-show-release-notes", "--message", "/ask What does this file print?", "hello.py"]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=580, check=False)
        said = done.stdout + done.stderr
        print(said)
        assert done.returncode == 0 and "Tokens:" in said, said
        # Without a network it also says that it cannot look up prices.
        assert not any(word in said for word in ("BadRequestError", "APIConnectionError", "num_ctx", "Retrying")), said


PARTS = [litellm, langchain, instructor, pydantic_ai, agents, llm, loop_openai, loop_responses, loop_anthropic]
PARTS += [responses_state, llama_index, lm_eval, aider]
{part.__name__: part for part in PARTS}[NAME]()
