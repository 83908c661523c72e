"""Grammars on the command line: a file's name, or the text itself."""

from __future__ import annotations

from pathlib import Path

from aioprefill.errors import InvalidRequest
from aioprefill.grammar_spec import MAX_GRAMMAR_BYTES

_SUFFIXES = (".json", ".ebnf", ".gbnf")


def read_grammar(field: str, given: str | None) -> str | None:
    """The text that an option stands for: of the file of that name, if there is one, else what is given.

    Raises `InvalidRequest` naming the field for a file that cannot be read or is too large.
    """
    if given is None:
        return None
    try:
        path = Path(given)
        if not path.is_file():
            if path.suffix in _SUFFIXES and "\n" not in given:
                raise InvalidRequest(field, f"there is no file {given}")
            return given
        if path.stat().st_size > MAX_GRAMMAR_BYTES:
            raise InvalidRequest(field, f"{given} has more than {MAX_GRAMMAR_BYTES:,} bytes")
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as err:
        raise InvalidRequest(field, f"{given} is not UTF-8: {err}") from err
    except OSError as err:
        if isinstance(err, PermissionError):
            raise InvalidRequest(field, f"{given} cannot be read: {err.strerror}") from err
        return given  # too long for a file's name, so it is the text
    except ValueError:
        return given  # a zero byte, which no file's name has
