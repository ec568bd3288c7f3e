"""`Llama` as programs for llama-cpp-python use it, on the CPU and a tiny model with random weights."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time

import numpy
import pytest

import kiln
from kiln import Llama, LlamaGrammar, LogitsProcessorList, StoppingCriteriaList

GREEDY = {"temperature": 0.0, "max_tokens": 12}


def test_a_text_is_continued_as_a_whole_and_in_chunks(llm):
    whole = llm("Once upon a time", **GREEDY)
    assert whole["object"] == "text_completion" and whole["id"].startswith("cmpl-")
    choice = whole["choices"][0]
    assert choice["finish_reason"] == "length" and choice["logprobs"] is None
    used = whole["usage"]
    assert used["completion_tokens"] == 12 and used["total_tokens"] == used["prompt_tokens"] + 12
    chunks = list(llm.create_completion("Once upon a time", stream=True, **GREEDY))
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == choice["text"]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks][-1] == "length"
    echoed = llm("Once upon a time", echo=True, **GREEDY)
    assert echoed["choices"][0]["text"] == "Once upon a time" + choice["text"]
    tokens = llm.tokenize(b"Once upon a time", special=True)
    assert llm(tokens, **GREEDY)["choices"][0]["text"] == choice["text"], "tokens are as good as their text"


def test_an_answer_ends_before_a_stop_text(llm):
    text = llm("Once upon a time", temperature=0.0, max_tokens=40)["choices"][0]["text"]
    stop = text[len(text) // 2 :][:3]
    cut = llm("Once upon a time", temperature=0.0, max_tokens=40, stop=[stop])["choices"][0]
    assert cut["text"] == text[: text.index(stop)] and cut["finish_reason"] == "stop"


def test_seeds_repeat_and_differ(llm):
    def drawn(seed):
        return llm("Once", max_tokens=16, temperature=1.0, seed=seed)["choices"][0]["text"]

    assert drawn(7) == drawn(7) != drawn(8)


def test_tokens_come_with_their_probabilities(llm):
    said = llm("Once upon", logprobs=3, **GREEDY)["choices"][0]["logprobs"]
    assert len(said["tokens"]) == len(said["token_logprobs"]) == len(said["text_offset"]) == 12
    for logprob, top in zip(said["token_logprobs"], said["top_logprobs"]):
        assert logprob <= 0 and max(top.values()) == pytest.approx(logprob), "greedy takes the likeliest"
    streamed = [c["choices"][0]["logprobs"] for c in llm("Once upon", logprobs=1, stream=True, **GREEDY)]
    assert sum(len(said["tokens"]) for said in streamed if said) == 12


def test_a_conversation_is_answered(llm):
    messages = [{"role": "system", "content": "You help."}, {"role": "user", "content": "Hi"}]
    whole = llm.create_chat_completion(messages, **GREEDY)
    assert whole["object"] == "chat.completion"
    message = whole["choices"][0]["message"]
    assert message["role"] == "assistant" and "tool_calls" not in message
    chunks = list(llm.create_chat_completion(messages, stream=True, **GREEDY))
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant"} and chunks[0]["object"] == "chat.completion.chunk"
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == message["content"]
    assert chunks[-1]["choices"][0]["finish_reason"] == "length" == whole["choices"][0]["finish_reason"]
    said = llm.create_chat_completion(messages, logprobs=True, top_logprobs=2, **GREEDY)["choices"][0]["logprobs"]
    assert len(said["content"]) == 12 and all(len(token["top_logprobs"]) == 2 for token in said["content"])


SCHEMA = {"type": "object", "properties": {"ready": {"type": "boolean"}}, "required": ["ready"], "additionalProperties": False}


def test_an_answer_keeps_to_a_schema_a_grammar_and_a_choice(llm):
    ask = [{"role": "user", "content": "Are you ready?"}]
    for format in ({"type": "json_object", "schema": SCHEMA}, {"type": "json_schema", "json_schema": {"schema": SCHEMA}}):
        text = llm.create_chat_completion(ask, response_format=format, max_tokens=200, temperature=0.0)["choices"][0]["message"]["content"]
        assert isinstance(json.loads(text)["ready"], bool)
    grammar = LlamaGrammar.from_string('root ::= "yes" | "no"')
    assert llm("Ready?", grammar=grammar, max_tokens=9)["choices"][0]["text"] in ("yes", "no")
    grammar = LlamaGrammar.from_json_schema(json.dumps(SCHEMA))
    assert set(json.loads(llm("Ready?", grammar=grammar, max_tokens=200, temperature=0.0)["choices"][0]["text"])) == {"ready"}


TOOL = {"type": "function", "function": {"name": "weather", "parameters": {
    "type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"], "additionalProperties": False}}}


def test_tools_are_called(llm):
    ask = [{"role": "user", "content": "How is the weather in Rome?"}]
    choice = {"type": "function", "function": {"name": "weather"}}
    settings = {"max_tokens": 300, "temperature": 0.0}
    said = llm.create_chat_completion(ask, tools=[TOOL], tool_choice=choice, **settings)["choices"][0]
    assert said["finish_reason"] == "tool_calls"
    call = said["message"]["tool_calls"][0]
    assert call["type"] == "function" and call["function"]["name"] == "weather" and call["id"]
    assert json.loads(call["function"]["arguments"])["city"] in ("Rome", "Oslo")
    chunks = llm.create_chat_completion(ask, tools=[TOOL], tool_choice=choice, stream=True, **settings)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    parts = [part for delta in deltas for part in delta.get("tool_calls", []) if part["index"] == 0]
    assert parts[0]["function"]["name"] == "weather"
    assert "".join(part["function"].get("arguments", "") for part in parts) == call["function"]["arguments"]
    # Functions, which came before tools.
    old = llm.create_chat_completion(ask, functions=[TOOL["function"]], function_call={"name": "weather"}, **settings)["choices"][0]
    assert old["finish_reason"] == "function_call" and old["message"]["function_call"]["name"] == "weather"


def test_threads_are_answered_together_and_as_alone(llm):
    prompts = [f"Story number {i} begins" for i in range(8)]
    alone = [llm(prompt, temperature=0.0, max_tokens=24)["choices"][0]["text"] for prompt in prompts]
    together, first, last = [None] * 8, [0.0] * 8, [0.0] * 8

    def ask(i):
        text = ""
        for chunk in llm(prompts[i], temperature=0.0, max_tokens=24, stream=True):
            first[i] = first[i] or time.monotonic()
            text += chunk["choices"][0]["text"]
        last[i], together[i] = time.monotonic(), text

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert together == alone
    assert sorted(first)[1] < min(last), "a second answer begins before the first one is over"


def test_tasks_are_answered_together_and_as_threads(llm):
    async def text(prompt):
        return "".join([piece async for piece in llm.agenerate(prompt, temperature=0.0, max_tokens=12)])

    async def all_of():
        chunks = await llm.create_chat_completion_async([{"role": "user", "content": "Hi"}], stream=True, **GREEDY)
        streamed = "".join([c["choices"][0]["delta"].get("content", "") async for c in chunks])
        whole, texts = await asyncio.gather(
            llm.create_completion_async("Once", **GREEDY), asyncio.gather(*(text(f"Number {i}") for i in range(6)))
        )
        return streamed, whole, texts

    streamed, whole, texts = asyncio.run(all_of())
    assert streamed == llm.create_chat_completion([{"role": "user", "content": "Hi"}], **GREEDY)["choices"][0]["message"]["content"]
    assert whole["choices"][0]["text"] == llm("Once", **GREEDY)["choices"][0]["text"]
    assert texts == [llm(f"Number {i}", **GREEDY)["choices"][0]["text"] for i in range(6)]
    with pytest.raises(TypeError, match="no argument temprature"):
        asyncio.run(llm.create_completion_async("Once", temprature=1))


def test_a_task_that_is_cancelled_ends_its_request(llm):
    async def some():
        async for _ in llm.agenerate("Once", temperature=0.0, max_tokens=400):
            return

    async def impatient():
        await asyncio.wait_for(some(), 30)
        began = time.monotonic()
        # The sequences are free again.
        await asyncio.gather(*(llm.create_completion_async("Twice", max_tokens=2, temperature=0.0) for _ in range(4)))
        return time.monotonic() - began

    assert asyncio.run(impatient()) < 20


def test_a_stream_that_is_left_ends_its_request(llm):
    for _ in range(6):
        stream = llm("Once", max_tokens=400, temperature=0.0, stream=True)
        next(stream)
        stream.close()
    assert llm("Once", **GREEDY)["usage"]["completion_tokens"] == 12


def test_processors_and_criteria_take_part(llm):
    seen = []

    def only_one(ids, scores):
        seen.append((ids.dtype, scores.shape))
        scores[:] = -numpy.inf
        scores[100] = 0.0
        return scores

    tokens = list(zip(range(5), llm.generate(llm.tokenize(b"Once"), logits_processor=LogitsProcessorList([only_one]))))
    assert [token for _, token in tokens] == [100] * 5
    assert seen[0] == (numpy.dtype(numpy.intc), (llm.n_vocab(),))
    long = StoppingCriteriaList([lambda ids, logits: len(ids) >= 12])
    said = llm("Once", max_tokens=100, temperature=0.0, stopping_criteria=long)
    assert said["usage"]["prompt_tokens"] + said["usage"]["completion_tokens"] <= 13
    assert said["choices"][0]["finish_reason"] == "stop"

    def broken(ids, scores):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        llm("Once", logits_processor=broken)
    assert llm.create_completion("Once", logit_bias={100: 200.0}, **GREEDY)["choices"][0]["text"] == llm.detokenize([100] * 12).decode(
        errors="replace"
    )


def test_tokens_and_bytes(llm):
    text = "Hé! A kiln is a kind of oven.".encode()
    tokens = llm.tokenize(text, add_bos=False)
    assert llm.detokenize(tokens) == text == b"".join(
        llm.detokenize([token], prev_tokens=tokens[:i]) for i, token in enumerate(tokens)
    )
    assert llm.tokenize("plain") == llm.tokenize(b"plain")
    assert len(llm.tokenize(b"Once", add_bos=True)) >= len(llm.tokenize(b"Once", add_bos=False))
    assert 0 < llm.n_embd() and llm.n_vocab() > max(tokens) and llm.n_ctx() == 512
    assert llm.metadata["general.architecture"] == "llama"
    assert "CPU" in llm.device or "cpu" in llm.device


def test_vectors_and_logits_are_arrays(path, llm):
    logits = llm.logits(llm.tokenize(b"Once upon a time"))
    assert logits.shape == (len(llm.tokenize(b"Once upon a time")), llm.n_vocab()) and logits.dtype == numpy.float32
    first = next(llm.generate(llm.tokenize(b"Once upon a time"), temp=0.0))
    assert int(logits[-1].argmax()) == first
    with Llama(path, n_ctx=256, n_gpu_layers=0, pooling_type=1) as vectors:
        one, two = vectors.embed_array(["a kiln", "an oven"], normalize=True)
        assert one.shape == (vectors.n_embd(),) and numpy.linalg.norm(one) == pytest.approx(1.0, abs=1e-5)
        assert vectors.embed("a kiln", normalize=True) == pytest.approx(one.tolist())
        assert not numpy.allclose(one, two)
        free = numpy.asarray(vectors.embed("a kiln"))
        assert free / numpy.linalg.norm(free) == pytest.approx(one, abs=1e-5)
        said = vectors.create_embedding(["a kiln", "an oven"])
        assert [item["index"] for item in said["data"]] == [0, 1] and said["usage"]["total_tokens"] > 2


def test_what_is_wrong_is_said(path, llm):
    with pytest.raises(FileNotFoundError, match="no-such.gguf"):
        Llama("no-such.gguf")
    with pytest.raises(ValueError, match="response_format"):
        llm.create_chat_completion([{"role": "user", "content": "Hi"}], response_format={"type": "yaml"})
    with pytest.raises(ValueError, match="no messages"):
        llm.create_chat_completion([])
    with pytest.raises(TypeError, match="n_gpu_layer\\b"):
        Llama(path, n_gpu_layer=3)
    with pytest.raises(TypeError, match="rope_freq_base"):
        Llama(path, rope_freq_base=1e6)
    with pytest.raises(ValueError, match="gaps"):
        llm("def f(", suffix="return 1")
    with pytest.raises(Exception, match="512"):
        llm([5] * 600)
    short = Llama(path, n_ctx=128, n_gpu_layers=0, use_mmap=True, n_batch=64, rope_freq_base=0.0)
    short.close()
    with pytest.raises(ValueError, match="closed"):
        short("Once")
    with pytest.raises(TypeError, match="pickled"):
        llm.__reduce__()
    assert kiln.__version__.count(".") == 2


@pytest.mark.skipif(os.name != "posix", reason="signals are sent as on Unix")
def test_ctrl_c_ends_an_answer_and_the_model_stays(path):
    program = """
import sys
from kiln import Llama
llm = Llama(sys.argv[1], n_ctx=4096, n_gpu_layers=0)
try:
    print("begins", flush=True)
    llm("Once", max_tokens=4000, logit_bias={llm.token_eos(): -100.0} if llm.token_eos() >= 0 else None)
    print("was not interrupted")
except KeyboardInterrupt:
    print("interrupted", llm("Once", max_tokens=3, temperature=0.0)["usage"]["completion_tokens"])
"""
    child = subprocess.Popen([sys.executable, "-c", program, path], stdout=subprocess.PIPE, text=True)
    assert child.stdout.readline() == "begins\n"
    time.sleep(0.3)
    child.send_signal(signal.SIGINT)
    assert child.communicate(timeout=60)[0] == "interrupted 3\n"


def test_a_program_may_end_in_the_middle_of_an_answer(path):
    program = "import sys; from kiln import Llama; next(Llama(sys.argv[1], n_ctx=256, n_gpu_layers=0)('a', stream=True, max_tokens=200))"
    assert subprocess.run([sys.executable, "-c", program, path], timeout=60).returncode == 0
