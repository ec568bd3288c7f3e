"""Pieces of an answer as OpenAI's API has them: pure functions from pieces to dictionaries."""

from __future__ import annotations

import time
import uuid
from typing import Any, Dict, Iterable, Iterator, List, Optional

Piece = Dict[str, Any]


class Texts:
    """The answer to a text that is continued."""

    def __init__(self, model: str, echo: str = "", logprobs: bool = False) -> None:
        self.head = {"id": f"cmpl-{uuid.uuid4()}", "object": "text_completion", "created": int(time.time()), "model": model}
        self.echo = echo
        self.logprobs = logprobs
        self.offset = len(echo)

    def choice(self, text: str, tokens: List[Piece], finish_reason: Optional[str]) -> Dict[str, Any]:
        logprobs = self.tokens(tokens) if self.logprobs else None
        return {**self.head, "choices": [{"text": text, "index": 0, "logprobs": logprobs, "finish_reason": finish_reason}]}

    def tokens(self, tokens: List[Piece]) -> Dict[str, Any]:
        """Tokens with their logarithms of probability, and where each begins in the text."""
        offsets = []
        for token in tokens:
            offsets.append(self.offset)
            self.offset += len(token["text"])
        return {
            "tokens": [token["text"] for token in tokens],
            "text_offset": offsets,
            "token_logprobs": [token.get("logprob") for token in tokens],
            "top_logprobs": [{top["text"]: top["logprob"] for top in token.get("top_logprobs", [])} for token in tokens],
        }

    def stream(self, pieces: Iterable[Piece]) -> Iterator[Dict[str, Any]]:
        """A chunk for each piece of text."""
        for piece in pieces:
            yield from self.chunks(piece)

    def chunks(self, piece: Piece) -> Iterator[Dict[str, Any]]:
        if self.echo:
            echo, self.echo = self.echo, ""
            yield self.choice(echo, [], None)
        if piece["type"] == "token" and self.logprobs:
            yield self.choice("", [piece], None)
        elif piece["type"] == "text":
            yield self.choice(piece["text"], [], None)
        elif piece["type"] == "end":
            yield self.choice("", [], finish(piece))

    def whole(self, pieces: Iterable[Piece]) -> Dict[str, Any]:
        """One dictionary."""
        text, tokens, end = self.echo, [], {}
        for piece in pieces:
            if piece["type"] == "text":
                text += piece["text"]
            elif piece["type"] == "token":
                tokens.append(piece)
            elif piece["type"] == "end":
                end = piece
        return {**self.choice(text, tokens, finish(end)), "usage": usage(end)}


class Chats:
    """The answer to a conversation."""

    def __init__(self, model: str, logprobs: bool = False, as_function: bool = False) -> None:
        self.id = f"chatcmpl-{uuid.uuid4()}"
        self.created = int(time.time())
        self.model = model
        self.logprobs = logprobs
        # `functions` were asked for, which came before tools: the answer has one call, in its own field.
        self.as_function = as_function
        self.begun = False
        self.calls = 0

    def chunk(self, delta: Dict[str, Any], finish_reason: Optional[str] = None, logprobs: Any = None) -> Dict[str, Any]:
        choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        head = {"id": self.id, "object": "chat.completion.chunk", "created": self.created, "model": self.model}
        return {**head, "choices": [choice]}

    def stream(self, pieces: Iterable[Piece]) -> Iterator[Dict[str, Any]]:
        """A chunk that names the role, then one for each piece."""
        for piece in pieces:
            yield from self.chunks(piece)

    def chunks(self, piece: Piece) -> Iterator[Dict[str, Any]]:
        if not self.begun:
            self.begun = True
            yield self.chunk({"role": "assistant"})
        kind = piece["type"]
        if kind == "text":
            yield self.chunk({"content": piece["text"]})
        elif kind == "reasoning":
            yield self.chunk({"reasoning_content": piece["text"]})
        elif kind == "call":
            self.calls += 1
            yield self.chunk(self.call(piece["index"], {"name": piece["name"], "arguments": ""}, call_id(piece)))
        elif kind == "arguments":
            yield self.chunk(self.call(piece["index"], {"arguments": piece["text"]}))
        elif kind == "token" and self.logprobs:
            yield self.chunk({}, logprobs={"content": [chat_token(piece)]})
        elif kind == "end":
            yield self.chunk({}, self.finish(piece))

    def call(self, index: int, function: Dict[str, Any], known: Optional[str] = None) -> Dict[str, Any]:
        if self.as_function:
            return {"function_call": function}
        call: Dict[str, Any] = {"index": index, "function": function}
        if known:
            call.update(id=known, type="function")
        return {"tool_calls": [call]}

    def finish(self, end: Piece) -> str:
        reason = finish(end)
        if self.calls and reason == "stop":
            return "function_call" if self.as_function else "tool_calls"
        return reason

    def whole(self, pieces: Iterable[Piece]) -> Dict[str, Any]:
        """One dictionary."""
        text, reasoning, end = "", "", {}
        calls: List[Dict[str, Any]] = []
        tokens: List[Dict[str, Any]] = []
        for piece in pieces:
            kind = piece["type"]
            if kind == "text":
                text += piece["text"]
            elif kind == "reasoning":
                reasoning += piece["text"]
            elif kind == "call":
                self.calls += 1
                function = {"name": piece["name"], "arguments": ""}
                calls.append({"id": call_id(piece), "type": "function", "function": function})
            elif kind == "arguments":
                calls[piece["index"]]["function"]["arguments"] += piece["text"]
            elif kind == "token":
                tokens.append(chat_token(piece))
            elif kind == "end":
                end = piece
        message: Dict[str, Any] = {"role": "assistant", "content": text if text or not calls else None}
        if reasoning:
            message["reasoning_content"] = reasoning
        if calls and self.as_function:
            message["function_call"] = calls[0]["function"]
        elif calls:
            message["tool_calls"] = calls
        logprobs = {"content": tokens} if self.logprobs else None
        choice = {"index": 0, "message": message, "logprobs": logprobs, "finish_reason": self.finish(end)}
        head = {"id": self.id, "object": "chat.completion", "created": self.created, "model": self.model}
        return {**head, "choices": [choice], "usage": usage(end)}


def call_id(piece: Piece) -> str:
    return piece.get("id") or f"call_{uuid.uuid4().hex[:24]}"


def chat_token(token: Piece) -> Dict[str, Any]:
    def one(said: Piece) -> Dict[str, Any]:
        return {"token": said["text"], "logprob": said.get("logprob"), "bytes": list(said["text"].encode())}

    return {**one(token), "top_logprobs": [one(top) for top in token.get("top_logprobs", [])]}


def finish(end: Piece) -> str:
    """`stop` or `length`; an answer that was ended early counts as the first."""
    reason = end.get("finish_reason", "stop")
    return "stop" if reason == "cancelled" else reason


def usage(end: Piece) -> Dict[str, Any]:
    said = end.get("usage", {})
    return {name: said.get(name, 0) for name in ("prompt_tokens", "completion_tokens", "total_tokens")}
