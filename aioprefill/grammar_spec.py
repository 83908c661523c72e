"""What a request may demand of the form of its output. Pure: knows nothing of how it is enforced."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import msgspec

from aioprefill.errors import InvalidRequest

MAX_GRAMMAR_BYTES = 1 << 16
MAX_SCHEMA_DEPTH = 64
"""Compiling takes time that grows with the square of the nesting, and more."""

Kind = Literal["json_schema", "regex", "grammar"]


class GrammarSpec(msgspec.Struct, frozen=True):
    """The output as a whole must match this. `kind` is also the field that errors name.

    json_schema: a JSON schema, as text; the output is one JSON value, on one line.
    regex: a regular expression; the output is a full match.
    grammar: rules in EBNF (GBNF notation); the output matches the rule `root`.
    """

    kind: Kind
    text: str

    @property
    def size(self) -> int:
        """Bytes of the text."""
        return len(self.text.encode())

    def validate(self) -> None:
        """Raise `InvalidRequest` for what is wrong at a glance; compiling tells the rest."""
        try:
            size = self.size
        except UnicodeEncodeError as err:
            raise InvalidRequest(self.kind, f"is no valid text: {err}") from err
        if not self.text.strip():
            raise InvalidRequest(self.kind, "is empty")
        if size > MAX_GRAMMAR_BYTES:
            raise InvalidRequest(self.kind, f"has {size:,} bytes, at most {MAX_GRAMMAR_BYTES:,} are taken")
        if "\0" in self.text:
            raise InvalidRequest(self.kind, "contains a zero byte")
        if self.kind == "json_schema":
            self._validate_schema()

    def _validate_schema(self) -> None:
        try:
            schema = msgspec.json.decode(self.text)
        except (msgspec.MsgspecError, UnicodeError) as err:
            raise InvalidRequest(self.kind, f"is no JSON: {err}") from err
        except RecursionError:
            raise InvalidRequest(self.kind, _TOO_DEEP) from None
        if not isinstance(schema, dict | bool):
            raise InvalidRequest(self.kind, f"must be a JSON object, got {type(schema).__name__}")
        if _deeper_than(schema, MAX_SCHEMA_DEPTH):
            raise InvalidRequest(self.kind, _TOO_DEEP)


_TOO_DEEP = f"nests deeper than {MAX_SCHEMA_DEPTH} levels"


def _deeper_than(value: Any, depth: int) -> bool:
    """Whether lists and objects nest deeper than so many levels. Level by level, without recursion."""
    level: list[Any] = [value]
    for _ in range(depth):
        level = [child for item in level for child in _children(item)]
        if not level:
            return False
    return any(isinstance(item, dict | list) for item in level)


def _children(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def one_grammar(
    *, json_schema: str | None = None, regex: str | None = None, grammar: str | None = None
) -> GrammarSpec | None:
    """The one that is given, checked; None for none. Raises `InvalidRequest` for more than one."""
    given: list[tuple[Kind, str | None]] = [
        ("json_schema", json_schema),
        ("regex", regex),
        ("grammar", grammar),
    ]
    found = [GrammarSpec(kind, text) for kind, text in given if text is not None]
    if len(found) > 1:
        names = " and ".join(spec.kind for spec in found)
        raise InvalidRequest(found[1].kind, f"{names} exclude each other: give one")
    for spec in found:
        spec.validate()
    return found[0] if found else None
