"""Kiln runs large language models (GGUF files) on GPUs through Vulkan, and on the CPU where there is none.

The signatures are those of llama-cpp-python:

    from kiln import Llama

    llm = Llama("model.gguf", n_ctx=8192, n_parallel=8)
    print(llm("Once upon a time", max_tokens=32)["choices"][0]["text"])

A model may be asked by any number of threads and tasks; what they ask at the same time is computed together.
"""

from ._kiln import VERSION as __version__
from .grammar import LlamaGrammar
from .hooks import LogitsProcessorList, StoppingCriteriaList
from .llama import Llama

__all__ = ["Llama", "LlamaGrammar", "LogitsProcessorList", "StoppingCriteriaList", "__version__"]
