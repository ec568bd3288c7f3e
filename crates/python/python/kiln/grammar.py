"""What an answer must look like."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


class LlamaGrammar:
    """A grammar in GBNF or Lark, or a JSON schema, that an answer keeps to."""

    def __init__(self, grammar: str | None = None, *, schema: Any = None) -> None:
        if (grammar is None) == (schema is None):
            raise ValueError("a grammar is a text or a schema")
        self.grammar = grammar
        self.schema = schema

    @classmethod
    def from_string(cls, grammar: str, verbose: bool = True) -> LlamaGrammar:
        """A grammar that is written out."""
        return cls(grammar)

    @classmethod
    def from_file(cls, file: str | Path, verbose: bool = True) -> LlamaGrammar:
        """The grammar in a file."""
        return cls(Path(file).read_text(encoding="utf-8"))

    @classmethod
    def from_json_schema(cls, json_schema: str, verbose: bool = True) -> LlamaGrammar:
        """JSON that fits a schema, which is given as a text."""
        return cls(schema=json.loads(json_schema))

    def fields(self) -> dict[str, Any]:
        """The fields of a request."""
        return {"grammar": self.grammar} if self.grammar is not None else {"json_schema": self.schema}
