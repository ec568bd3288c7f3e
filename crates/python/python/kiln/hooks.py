"""Functions of the caller's that take part in sampling. They run on the engine's thread: all requests wait for them."""

from __future__ import annotations

from typing import Any, Callable, List, Optional, Union

Processor = Callable[[Any, Any], Any]
Criterion = Callable[[Any, Any], bool]


class LogitsProcessorList(List[Processor]):
    """Functions of the tokens so far and the logits of the next one, that return other logits; the next gets what the last returned."""

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        for processor in self:
            scores = processor(input_ids, scores)
        return scores


class StoppingCriteriaList(List[Criterion]):
    """Functions of the tokens so far and the logits of the next one, that say whether the answer ends here: any of them ends it."""

    def __call__(self, input_ids: Any, logits: Any) -> bool:
        return any(stop(input_ids, logits) for stop in self)


def hook(
    processor: Optional[Processor], criteria: Optional[Criterion], end: Optional[int]
) -> Optional[Callable[[bytes, bytes], Union[None, bytes, int]]]:
    """What the engine calls for each token; none where there is nothing to do. `end` is the token that ends a text."""
    if processor is None and criteria is None:
        return None
    if criteria is not None and end is None:
        raise ValueError("stopping_criteria need a model with a token that ends a text")
    numpy = numpy_or_raise("logits_processor and stopping_criteria")

    def call(tokens: bytes, logits: bytes) -> Union[None, bytes, int]:
        ids = numpy.frombuffer(tokens, dtype=numpy.uint32).astype(numpy.intc)
        scores = numpy.frombuffer(logits, dtype=numpy.float32).copy()
        if criteria is not None and criteria(ids, scores):
            return end
        if processor is None:
            return None
        changed = numpy.asarray(processor(ids, scores), dtype=numpy.float32)
        if changed.shape != scores.shape:
            raise ValueError(f"logits_processor returned an array of shape {changed.shape}, not {scores.shape}")
        return changed.tobytes()

    return call


def numpy_or_raise(what: str) -> Any:
    """The package numpy."""
    try:
        import numpy
    except ImportError as why:
        raise ImportError(f"{what} need numpy: pip install numpy") from why
    return numpy
