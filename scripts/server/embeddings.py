"""Drives a running server whose model gives vectors of texts, with the openai and ollama packages.

    python scripts/server/embeddings.py URL API_KEY

The model is a random one: what vectors mean is not judged here, but their shapes, lengths and order are.
"""

import base64
import json
import math
import struct
import sys
import urllib.request

import ollama
import openai

URL, KEY = sys.argv[1], sys.argv[2]
MODEL = "judged"
TEXTS = ["hello world", "the other thing", "a"]

client = openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0)
llama = ollama.Client(host=URL, headers={"Authorization": f"Bearer {KEY}"})


def cosine(a, b):
    dot = lambda a, b: sum(x * y for x, y in zip(a, b))
    return dot(a, b) / math.sqrt(dot(a, a) * dot(b, b))


def posted(path, body):
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
    return json.load(urllib.request.urlopen(urllib.request.Request(URL + path, json.dumps(body).encode(), headers), timeout=60))


def main():
    # This client asks for base64 and makes floats of it.
    made = client.embeddings.create(model=MODEL, input=TEXTS)
    vectors = [row.embedding for row in made.data]
    assert [row.index for row in made.data] == [0, 1, 2] and made.usage.prompt_tokens > 6, made.usage
    assert all(abs(math.hypot(*vector) - 1) < 1e-5 for vector in vectors)
    assert cosine(vectors[0], vectors[1]) < 0.999

    plain = client.embeddings.create(model=MODEL, input=TEXTS[1], encoding_format="float").data[0].embedding
    assert cosine(plain, vectors[1]) > 1 - 1e-6
    raw = posted("/v1/embeddings", {"input": TEXTS[1], "encoding_format": "base64"})["data"][0]["embedding"]
    bits = base64.b64decode(raw)
    assert cosine(struct.unpack(f"<{len(bits) // 4}f", bits), plain) > 1 - 1e-6
    cut = client.embeddings.create(model=MODEL, input=TEXTS[1], dimensions=8).data[0].embedding
    assert len(cut) == 8 and abs(math.hypot(*cut) - 1) < 1e-5 and cosine(cut, plain[:8]) > 1 - 1e-6
    try:
        client.embeddings.create(model=MODEL, input="hello " * 500)
        raise AssertionError("a text that is too long was taken")
    except openai.BadRequestError as error:
        assert error.code == "context_length_exceeded", error
    try:
        client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "hello"}])
        raise AssertionError("a model that writes nothing has written")
    except openai.APIStatusError as error:
        assert "vectors" in str(error), error

    batch = llama.embed(model=MODEL, input=TEXTS)
    assert all(cosine(a, b) > 1 - 1e-6 for a, b in zip(batch.embeddings, vectors)) and batch.prompt_eval_count == made.usage.prompt_tokens
    assert cosine(llama.embeddings(model=MODEL, prompt=TEXTS[0]).embedding, vectors[0]) > 1 - 1e-6
    assert "embedding" in llama.show(MODEL).capabilities
    long = llama.embed(model=MODEL, input="hello " * 500)
    assert long.prompt_eval_count == 128, long.prompt_eval_count

    ranked = posted("/v1/rerank", {"model": MODEL, "query": "what?", "documents": TEXTS, "top_n": 2})
    scores = [row["relevance_score"] for row in ranked["results"]]
    assert len(scores) == 2 and scores[0] >= scores[1], ranked
    print(f"vectors and ranks: openai {openai.__version__} and ollama agree")


main()
