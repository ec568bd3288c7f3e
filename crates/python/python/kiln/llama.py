"""`Llama`, a loaded model with the methods of llama-cpp-python."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any, AsyncIterator, Callable, Dict, Iterator, List, Optional, Sequence, Union

from ._kiln import Model
from .answers import Chats, Piece, Texts
from .grammar import LlamaGrammar
from .hooks import Criterion, Processor, hook, numpy_or_raise

# Numbers of ggml's types, for those who name the types of caches as llama.cpp does.
CACHE_TYPES = {0: "f32", 1: "f16", 2: "q4_0", 3: "q4_1", 6: "q5_0", 7: "q5_1", 8: "q8_0", 30: "bf16"}
POOLINGS = {0: "none", 1: "mean", 2: "cls", 3: "last", 4: "rank"}
# How tokens that mark the text before a gap, behind it, and the gap are spelled.
GAPS = [
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),
]


class Llama:
    """A loaded model. Threads and tasks may share it: up to `n_parallel` of their requests are computed in one batch, and more wait for
    their turn.

    Arguments that only tune llama.cpp (`n_batch`, `use_mmap`, `flash_attn` and the like) are accepted and have no effect.
    """

    def __init__(
        self,
        model_path: Union[str, "os.PathLike[str]"],
        *,
        n_gpu_layers: int = -1,
        main_gpu: Optional[int] = None,
        tensor_split: Optional[Sequence[float]] = None,
        seed: Optional[int] = None,
        n_ctx: int = 0,
        n_parallel: int = 1,
        n_threads: Optional[int] = None,
        pooling_type: Optional[int] = None,
        lora_path: Optional[str] = None,
        lora_scale: float = 1.0,
        chat_format: Optional[str] = None,
        type_k: Optional[Union[int, str]] = None,
        type_v: Optional[Union[int, str]] = None,
        device: Optional[str] = None,
        reproducible: bool = False,
        verbose: bool = False,
        **ignored: Any,
    ) -> None:
        """Opens a model file.

        `n_gpu_layers` is -1 for as many layers on GPUs as fit and 0 for the CPU alone; `n_ctx` is the context of one sequence, 0 for the
        model's own as far as memory allows; `n_parallel` how many sequences run at once; `device` a GPU by index or name, or `cpu`;
        `chat_format` a template (Jinja) or the name of a well-known one, such as `chatml`. `verbose` writes to stderr what there is to tell.
        """
        self.model_path = os.fspath(model_path)
        self.verbose = verbose
        self._seed = seed
        self._pooling = POOLINGS.get(pooling_type) if pooling_type is not None else None
        unknown = sorted(name for name, value in ignored.items() if name not in IGNORED and not (name in LACKING and not value))
        if unknown:
            raise TypeError(f"Llama() of Kiln has no argument {', '.join(unknown)}")
        adapters = [{"path": lora_path, "scale": lora_scale}] if lora_path else []
        if device is None and n_gpu_layers == 0:
            device = "cpu"
        if device is None and main_gpu is not None:
            device = str(main_gpu)
        options = {
            "device": device,
            "threads": n_threads,
            "context": n_ctx or None,
            "parallel": n_parallel,
            "gpu_layers": n_gpu_layers if n_gpu_layers > 0 else None,
            "split": list(tensor_split) if tensor_split else None,
            "cache_type_k": cache_type(type_k),
            "cache_type_v": cache_type(type_v),
            "chat_template": chat_format,
            "adapters": adapters,
            "reproducible": reproducible,
        }
        note = (lambda said: print(said, file=sys.stderr)) if verbose else None
        self._model = Model.open(self.model_path, json.dumps(options), note)
        self._facts = json.loads(self._model.facts())
        if verbose:
            print(f"{self._facts['name']} on {self._facts['device']}, {self.n_ctx()} tokens of context", file=sys.stderr)

    @classmethod
    def from_pretrained(
        cls, repo_id: str, filename: Optional[str], local_dir: Optional[str] = None, cache_dir: Optional[str] = None, **kwargs: Any
    ) -> Llama:
        """Fetches a file of a repository of Hugging Face by the package `huggingface_hub`, and opens it. `filename` may hold `*`."""
        try:
            from huggingface_hub import HfFileSystem, hf_hub_download
        except ImportError as why:
            raise ImportError("from_pretrained needs huggingface_hub: pip install huggingface-hub") from why
        import fnmatch

        found = [path[len(repo_id) + 1 :] for path in HfFileSystem().glob(f"{repo_id}/**")]
        fits = [path for path in found if path.endswith(".gguf") and (filename is None or fnmatch.fnmatch(path, filename))]
        if len(fits) != 1:
            raise ValueError(f"{len(fits)} files of {repo_id} fit {filename!r}: {', '.join(fits) or 'none of ' + ', '.join(found)}")
        path = hf_hub_download(repo_id=repo_id, filename=fits[0], local_dir=local_dir, cache_dir=cache_dir)
        return cls(path, **kwargs)

    # --- texts -------------------------------------------------------------------------------------------------------

    def __call__(self, prompt: Union[str, Sequence[int]], **kwargs: Any) -> Union[Dict[str, Any], Iterator[Dict[str, Any]]]:
        """Continues a text: see `create_completion`."""
        return self.create_completion(prompt, **kwargs)

    def create_completion(
        self,
        prompt: Union[str, Sequence[int]],
        suffix: Optional[str] = None,
        max_tokens: Optional[int] = 16,
        temperature: Optional[float] = None,
        top_p: Optional[float] = None,
        min_p: Optional[float] = None,
        typical_p: Optional[float] = None,
        logprobs: Optional[int] = None,
        echo: bool = False,
        stop: Union[None, str, List[str]] = None,
        frequency_penalty: Optional[float] = None,
        presence_penalty: Optional[float] = None,
        repeat_penalty: Optional[float] = None,
        top_k: Optional[int] = None,
        stream: bool = False,
        seed: Optional[int] = None,
        tfs_z: Optional[float] = None,
        mirostat_mode: Optional[int] = None,
        mirostat_tau: Optional[float] = None,
        mirostat_eta: Optional[float] = None,
        model: Optional[str] = None,
        stopping_criteria: Optional[Criterion] = None,
        logits_processor: Optional[Processor] = None,
        grammar: Optional[LlamaGrammar] = None,
        logit_bias: Optional[Dict[int, float]] = None,
    ) -> Union[Dict[str, Any], Iterator[Dict[str, Any]]]:
        """Continues a text, or tokens. Where a setting is not given, that of the model's file holds, else the usual one.

        Returns a dictionary as OpenAI's API has it, or with `stream` an iterator of them."""
        given = {name: value for name, value in locals().items() if name != "self"}
        request, call, answer = self._text(given)
        pieces = self._pieces(request, call)
        return answer.stream(pieces) if stream else answer.whole(pieces)

    async def create_completion_async(
        self, prompt: Union[str, Sequence[int]], stream: bool = False, **kwargs: Any
    ) -> Union[Dict[str, Any], AsyncIterator[Dict[str, Any]]]:
        """The same for a task: a dictionary, or with `stream` an asynchronous iterator. `kwargs` are those of `create_completion`."""
        given = {"max_tokens": 16, "prompt": prompt, **kwargs}
        check_names(given, TEXT_NAMES, "create_completion_async")
        request, call, answer = self._text(given)
        return await self._answer_async(request, call, answer, stream)

    async def agenerate(self, prompt: Union[str, Sequence[int]], **kwargs: Any) -> AsyncIterator[str]:
        """Continues a text for a task: an asynchronous generator of pieces of text. It ends where the model does, unless `max_tokens` says
        otherwise. `kwargs` are those of `create_completion`."""
        given = {"max_tokens": None, "prompt": prompt, **kwargs}
        check_names(given, TEXT_NAMES, "agenerate")
        request, call, _ = self._text(given)
        async for piece in self._pieces_async(request, call):
            if piece["type"] == "text":
                yield piece["text"]

    def _text(self, given: Dict[str, Any]) -> Any:
        """What `create_completion` was given, as a request, a hook and the form of the answer."""
        prompt, suffix = given["prompt"], given.get("suffix")
        request = self._settings(given)
        # A prompt of bytes is a text of llama-cpp-python's older versions.
        text = prompt.decode() if isinstance(prompt, bytes) else prompt
        if suffix:
            request["prompt"] = self._gap(text, suffix)
        else:
            request["prompt"] = text if isinstance(text, str) else [int(token) for token in text]
        logprobs = given.get("logprobs")
        if logprobs is not None:
            request["logprobs"] = int(logprobs)
        echo = ""
        if given.get("echo"):
            echo = text if isinstance(text, str) else self.detokenize(request["prompt"]).decode(errors="replace")
        call = hook(given.get("logits_processor"), given.get("stopping_criteria"), self._end())
        return request, call, Texts(given.get("model") or self.model_path, echo, logprobs is not None)

    def _gap(self, prefix: str, suffix: str) -> List[int]:
        """The tokens of a prompt with a gap to be filled."""
        for spelled in GAPS:
            marks = [self._model.tokenize(mark, False, True) for mark in spelled]
            if all(len(mark) == 1 for mark in marks):
                before = self._model.tokenize(prefix, False, False)
                behind = self._model.tokenize(suffix, False, False)
                return marks[0] + before + marks[1] + behind + marks[2]
        raise ValueError("`suffix` needs a model that was trained to fill gaps; this one has no tokens for them")

    # --- conversations -----------------------------------------------------------------------------------------------

    def create_chat_completion(
        self,
        messages: List[Dict[str, Any]],
        functions: Optional[List[Dict[str, Any]]] = None,
        function_call: Union[None, str, Dict[str, Any]] = None,
        tools: Optional[List[Dict[str, Any]]] = None,
        tool_choice: Union[None, str, Dict[str, Any]] = None,
        temperature: Optional[float] = None,
        top_p: Optional[float] = None,
        top_k: Optional[int] = None,
        min_p: Optional[float] = None,
        typical_p: Optional[float] = None,
        stream: bool = False,
        stop: Union[None, str, List[str]] = None,
        seed: Optional[int] = None,
        response_format: Optional[Dict[str, Any]] = None,
        max_tokens: Optional[int] = None,
        presence_penalty: Optional[float] = None,
        frequency_penalty: Optional[float] = None,
        repeat_penalty: Optional[float] = None,
        tfs_z: Optional[float] = None,
        mirostat_mode: Optional[int] = None,
        mirostat_tau: Optional[float] = None,
        mirostat_eta: Optional[float] = None,
        model: Optional[str] = None,
        logits_processor: Optional[Processor] = None,
        grammar: Optional[LlamaGrammar] = None,
        logit_bias: Optional[Dict[int, float]] = None,
        logprobs: Optional[bool] = None,
        top_logprobs: Optional[int] = None,
    ) -> Union[Dict[str, Any], Iterator[Dict[str, Any]]]:
        """Answers a conversation by the model's own template.

        Returns a dictionary as OpenAI's API has it, or with `stream` an iterator of chunks."""
        given = {name: value for name, value in locals().items() if name != "self"}
        request, call, answer = self._chat(given)
        pieces = self._pieces(request, call)
        return answer.stream(pieces) if stream else answer.whole(pieces)

    def create_chat_completion_openai_v1(self, *args: Any, **kwargs: Any) -> Any:
        """The same as objects of the package `openai`."""
        try:
            from openai.types.chat import ChatCompletion, ChatCompletionChunk
        except ImportError as why:
            raise ImportError("create_chat_completion_openai_v1 needs openai: pip install openai") from why
        answer = self.create_chat_completion(*args, **kwargs)
        if kwargs.get("stream"):
            return (ChatCompletionChunk(**chunk) for chunk in answer)
        return ChatCompletion(**answer)  # type: ignore[arg-type]

    async def create_chat_completion_async(
        self, messages: List[Dict[str, Any]], stream: bool = False, **kwargs: Any
    ) -> Union[Dict[str, Any], AsyncIterator[Dict[str, Any]]]:
        """The same for a task: a dictionary, or with `stream` an asynchronous iterator. `kwargs` are those of `create_chat_completion`."""
        given = {"messages": messages, **kwargs}
        check_names(given, CHAT_NAMES, "create_chat_completion_async")
        request, call, answer = self._chat(given)
        return await self._answer_async(request, call, answer, stream)

    def _chat(self, given: Dict[str, Any]) -> Any:
        """What `create_chat_completion` was given, as a request, a hook and the form of the answer."""
        request = self._settings(given)
        request["messages"] = given["messages"]
        request["response_format"] = given.get("response_format")
        tools, choice = given.get("tools"), given.get("tool_choice")
        functions = given.get("functions")
        if functions and not tools:
            tools = [{"type": "function", "function": function} for function in functions]
            named = given.get("function_call")
            choice = {"type": "function", "function": named} if isinstance(named, dict) else named
            request["parallel_tool_calls"] = False
        if tools:
            request["tools"] = tools
            request["tool_choice"] = choice
        logprobs = bool(given.get("logprobs"))
        if logprobs:
            request["logprobs"] = int(given.get("top_logprobs") or 0)
        call = hook(given.get("logits_processor"), None, self._end())
        answer = Chats(given.get("model") or self.model_path, logprobs, bool(functions) and not given.get("tools"))
        return request, call, answer

    # --- requests ----------------------------------------------------------------------------------------------------

    def _settings(self, given: Dict[str, Any]) -> Dict[str, Any]:
        """The fields of a request that texts and conversations share."""
        request = {name: given.get(name) for name in SETTINGS}
        seed = given.get("seed")
        request["seed"] = self._seed if seed is None else seed
        request["mirostat"] = given.get("mirostat_mode")
        limit = given.get("max_tokens")
        # llama-cpp-python has no limit at 0 and below.
        request["max_tokens"] = int(limit) if limit is not None and limit > 0 else None
        stop = given.get("stop")
        request["stop"] = [stop] if isinstance(stop, str) else stop or None
        if given.get("logit_bias"):
            request["logit_bias"] = {str(token): float(bias) for token, bias in given["logit_bias"].items()}
        if given.get("grammar") is not None:
            request.update(given["grammar"].fields())
        return {name: value for name, value in request.items() if value is not None}

    def _end(self) -> Optional[int]:
        ends = (self._facts["eot"], self._facts["eos"])
        return next((token for token in ends if token is not None), None)

    def _pieces(self, request: Dict[str, Any], call: Optional[Callable[..., Any]]) -> Iterator[Piece]:
        """The pieces of an answer. The request is on its way when this returns."""
        pieces = self._model.generate(json.dumps(request), call)

        def read() -> Iterator[Piece]:
            try:
                for piece in pieces:
                    yield json.loads(piece)
            finally:
                # Also where the reader stops early, and by Ctrl-C.
                pieces.close()

        return read()

    async def _pieces_async(self, request: Dict[str, Any], call: Optional[Callable[..., Any]]) -> AsyncIterator[Piece]:
        """The same for a task."""
        pieces = self._model.generate_async(json.dumps(request), call)
        loop = asyncio.get_running_loop()
        try:
            while True:
                came = asyncio.Event()
                ready = pieces.poll(lambda: loop.call_soon_threadsafe(came.set))
                if ready is None:
                    return
                if not ready:
                    await came.wait()
                for piece in ready:
                    yield json.loads(piece)
        finally:
            pieces.close()

    async def _answer_async(self, request: Dict[str, Any], call: Any, answer: Union[Texts, Chats], stream: bool) -> Any:
        pieces = self._pieces_async(request, call)
        if not stream:
            return answer.whole([piece async for piece in pieces])

        async def chunks() -> AsyncIterator[Dict[str, Any]]:
            async for piece in pieces:
                for chunk in answer.chunks(piece):
                    yield chunk

        return chunks()

    def generate(
        self,
        tokens: Sequence[int],
        top_k: Optional[int] = None,
        top_p: Optional[float] = None,
        min_p: Optional[float] = None,
        typical_p: Optional[float] = None,
        temp: Optional[float] = None,
        repeat_penalty: Optional[float] = None,
        reset: bool = True,
        frequency_penalty: Optional[float] = None,
        presence_penalty: Optional[float] = None,
        tfs_z: Optional[float] = None,
        mirostat_mode: Optional[int] = None,
        mirostat_tau: Optional[float] = None,
        mirostat_eta: Optional[float] = None,
        logits_processor: Optional[Processor] = None,
        stopping_criteria: Optional[Criterion] = None,
        grammar: Optional[LlamaGrammar] = None,
    ) -> Iterator[int]:
        """Tokens that continue tokens, one by one, until the model ends or the caller stops reading."""
        given = {name: value for name, value in locals().items() if name not in ("self", "temp", "reset")}
        request = self._settings({**given, "temperature": temp})
        request.update(prompt=[int(token) for token in tokens], tokens=True)
        call = hook(logits_processor, stopping_criteria, self._end())
        for piece in self._pieces(request, call):
            if piece["type"] == "token":
                yield piece["id"]

    # --- vectors and tokens ------------------------------------------------------------------------------------------

    def create_embedding(self, input: Union[str, List[str]], model: Optional[str] = None) -> Dict[str, Any]:
        """The vectors of texts, as OpenAI's API has them."""
        vectors, count = self.embed([input] if isinstance(input, str) else input, return_count=True)
        data = [{"object": "embedding", "embedding": vector, "index": index} for index, vector in enumerate(vectors)]
        used = {"prompt_tokens": count, "total_tokens": count}
        return {"object": "list", "data": data, "model": model or self.model_path, "usage": used}

    def embed(
        self, input: Union[str, List[str]], normalize: bool = False, truncate: bool = True, return_count: bool = False
    ) -> Any:
        """The vector of a text, or those of several, as lists of numbers: `embed_array` is faster."""
        texts = [input] if isinstance(input, str) else list(input)
        vectors = [memoryview(vector).cast("f").tolist() for vector in self._embed(texts, normalize, truncate)]
        if self._pooling == "none":
            width = self.n_embd()
            vectors = [[vector[at : at + width] for at in range(0, len(vector), width)] for vector in vectors]
        found = vectors[0] if isinstance(input, str) else vectors
        if not return_count:
            return found
        return found, sum(len(self._model.tokenize(text, True, False)) for text in texts)

    def embed_array(self, input: Union[str, List[str]], normalize: bool = False, truncate: bool = True) -> Any:
        """The same as an array of numpy: one row for each text, or a single one for a single text."""
        numpy = numpy_or_raise("embed_array")
        texts = [input] if isinstance(input, str) else list(input)
        rows = [numpy.frombuffer(vector, dtype=numpy.float32) for vector in self._embed(texts, normalize, truncate)]
        return rows[0].copy() if isinstance(input, str) else numpy.stack(rows)

    def _embed(self, texts: List[str], normalize: bool, truncate: bool) -> List[bytes]:
        return self._model.embed(texts, self._pooling, normalize, truncate)

    def logits(self, tokens: Sequence[int]) -> Any:
        """The logits behind each token, as an array of numpy with a row for each."""
        numpy = numpy_or_raise("logits")
        rows = self._model.logits([int(token) for token in tokens])
        return numpy.frombuffer(rows, dtype=numpy.float32).reshape(len(tokens), self.n_vocab())

    def tokenize(self, text: Union[bytes, str], add_bos: bool = True, special: bool = False) -> List[int]:
        """The tokens of a text: whether the ones that the model wants around it are added, and whether spellings of special tokens count."""
        return self._model.tokenize(text if isinstance(text, str) else bytes(text).decode(), add_bos, special)

    def detokenize(self, tokens: Sequence[int], prev_tokens: Optional[Sequence[int]] = None, special: bool = False) -> bytes:
        """The bytes of tokens; special tokens have none unless `special` says so. `prev_tokens` are those before."""
        before = [int(token) for token in prev_tokens or []]
        whole = self._model.detokenize(before + [int(token) for token in tokens], special)
        return whole[len(self._model.detokenize(before, special)) if before else 0 :]

    # --- facts -------------------------------------------------------------------------------------------------------

    def n_ctx(self) -> int:
        """Most tokens of one sequence."""
        return self._facts["context"]

    def n_ctx_train(self) -> int:
        """The context that the model was trained with."""
        return self._facts["trained_context"]

    def n_embd(self) -> int:
        """The width of the model, and of its vectors of tokens."""
        return self._facts["hidden"]

    def n_vocab(self) -> int:
        """Tokens of the vocabulary."""
        return self._facts["vocab"]

    def token_bos(self) -> int:
        """The token that begins a text; -1 without one."""
        return -1 if self._facts["bos"] is None else self._facts["bos"]

    def token_eos(self) -> int:
        """The token that ends a text; -1 without one."""
        return -1 if self._facts["eos"] is None else self._facts["eos"]

    def token_nl(self) -> int:
        """The token of a line's end."""
        return self._model.tokenize("\n", False, False)[-1]

    @property
    def metadata(self) -> Dict[str, str]:
        """What the file says of itself, without lists."""
        return self._facts["metadata"]

    @property
    def device(self) -> str:
        """Where the model runs."""
        return self._facts["device"]

    def set_seed(self, seed: int) -> None:
        """The seed of requests that name none."""
        self._seed = seed

    def set_cache(self, cache: Any) -> None:
        """Nothing: beginnings that prompts have in common are always computed once."""

    def reset(self) -> None:
        """Nothing: each request has a sequence of its own."""

    def close(self) -> None:
        """Gives back what the model takes, as soon as its last answer has ended."""
        self._model.close()

    def __enter__(self) -> Llama:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Llama {self._facts['name']} on {self._facts['device']}>"

    def __reduce__(self) -> Any:
        raise TypeError("a model cannot be pickled: each process opens its own")


# Settings of samplers that have the same name in a request.
SETTINGS = (
    "temperature top_p top_k min_p typical_p repeat_penalty frequency_penalty presence_penalty mirostat_tau mirostat_eta".split()
)
# What `create_completion` and `create_chat_completion` take.
TEXT_NAMES = frozenset(Llama.create_completion.__code__.co_varnames[1 : Llama.create_completion.__code__.co_argcount])
CHAT_NAMES = frozenset(Llama.create_chat_completion.__code__.co_varnames[1 : Llama.create_chat_completion.__code__.co_argcount])
# What only tunes llama.cpp, or says what Kiln finds out by itself.
IGNORED = frozenset(
    "split_mode use_mmap use_mlock n_batch n_ubatch n_threads_batch logits_all embedding offload_kqv flash_attn op_offload swa_full "
    "no_perf last_n_tokens_size numa".split()
)
# What would change answers, and cannot be had: an error, unless the value says that it is not wanted.
LACKING = frozenset(
    "vocab_only kv_overrides rope_scaling_type rope_freq_base rope_freq_scale yarn_ext_factor yarn_attn_factor yarn_beta_fast "
    "yarn_beta_slow yarn_orig_ctx lora_base chat_handler draft_model tokenizer spm_infill".split()
)


def cache_type(given: Union[None, int, str]) -> Optional[str]:
    """The name of a type of caches."""
    if isinstance(given, int):
        if given not in CACHE_TYPES:
            raise ValueError(f"a cache cannot have the type {given}: {CACHE_TYPES}")
        return CACHE_TYPES[given]
    return given


def check_names(given: Dict[str, Any], known: Any, function: str) -> None:
    unknown = sorted(set(given) - known)
    if unknown:
        raise TypeError(f"{function}() has no argument {', '.join(unknown)}")
