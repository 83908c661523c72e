"""What values a setting may take: text to value, value to text, and the words for what is allowed.

Rule: a kind knows nothing of names and sources. It raises `ValueError`; who asks knows the rest.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

AUTO = "auto"
_UNITS = {
    "": 1, "b": 1,
    "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
}  # fmt: skip


class Kind(ABC):
    """One type of setting."""

    metavar = "TEXT"

    @property
    @abstractmethod
    def allowed(self) -> str:
        """What may be given, for an error message: "a whole number from 1 to 1024"."""

    @abstractmethod
    def parse(self, text: str) -> Any:
        """The value that `text` stands for, or `ValueError`."""

    @abstractmethod
    def check(self, value: Any) -> Any:
        """A typed value in its normal form (a path as `Path`), or `ValueError`."""

    def read(self, raw: Any) -> Any:
        """A value from a TOML file, where numbers may also be written as text."""
        return self.parse(raw) if isinstance(raw, str) else self.check(raw)

    def show(self, value: Any) -> str:
        """Text that `parse` turns into `value` again."""
        return str(value)


@dataclass(frozen=True)
class Integer(Kind):
    """A whole number within bounds, both included."""

    low: int
    high: int
    metavar = "N"

    @property
    def allowed(self) -> str:
        return f"a whole number from {self.low:,} to {self.high:,}"

    def parse(self, text: str) -> int:
        return self.check(int(text.strip()))

    def check(self, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not self.low <= value <= self.high:
            raise ValueError(value)
        return value


@dataclass(frozen=True)
class Seconds(Kind):
    """A duration in seconds within bounds, both included."""

    low: float
    high: float
    metavar = "SECONDS"

    @property
    def allowed(self) -> str:
        return f"seconds from {self.low:g} to {self.high:g}"

    def parse(self, text: str) -> float:
        return self.check(float(text.strip()))

    def check(self, value: Any) -> float:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not math.isfinite(value) or not self.low <= value <= self.high:
            raise ValueError(value)
        return float(value)

    def show(self, value: Any) -> str:
        return f"{value:g}"


@dataclass(frozen=True)
class Part(Seconds):
    """A part of a whole, as a number within bounds, both included."""

    metavar = "PART"

    @property
    def allowed(self) -> str:
        return f"a number from {self.low:g} to {self.high:g}"


@dataclass(frozen=True)
class Switch(Kind):
    """On or off. On the command line `--name` and `--no-name`."""

    metavar = "BOOL"

    @property
    def allowed(self) -> str:
        return "true or false (also 1/0, yes/no, on/off)"

    def parse(self, text: str) -> bool:
        word = text.strip().lower()
        if word in {"1", "true", "yes", "on"}:
            return True
        if word in {"0", "false", "no", "off"}:
            return False
        raise ValueError(text)

    def check(self, value: Any) -> bool:
        if not isinstance(value, bool):
            raise ValueError(value)
        return value

    def show(self, value: Any) -> str:
        return "true" if value else "false"


@dataclass(frozen=True)
class Choice(Kind):
    """One of a few words; `aliases` are other spellings of them."""

    words: Sequence[str]
    aliases: Mapping[str, str] = field(default_factory=dict)
    metavar = "NAME"

    @property
    def allowed(self) -> str:
        return "one of " + ", ".join(self.words)

    def parse(self, text: str) -> str:
        word = text.strip().lower()
        word = self.aliases.get(word, word)
        if word not in self.words:
            raise ValueError(text)
        return word

    def check(self, value: Any) -> str:
        if not isinstance(value, str):
            raise ValueError(value)
        return self.parse(value)


@dataclass(frozen=True)
class Pattern(Kind):
    """Text that matches a pattern as a whole."""

    pattern: str
    words: str
    metavar: str = "TEXT"

    @property
    def allowed(self) -> str:
        return self.words

    def parse(self, text: str) -> str:
        return self.check(text.strip())

    def check(self, value: Any) -> str:
        if not isinstance(value, str) or not re.fullmatch(self.pattern, value):
            raise ValueError(value)
        return value


@dataclass(frozen=True)
class Endpoint(Kind):
    """A ZMQ endpoint over TCP (an address, not a host name, is best for a listener) or a Unix socket."""

    metavar = "ENDPOINT"

    @property
    def allowed(self) -> str:
        return "tcp://HOST:PORT with a port from 0 (any free one) to 65535, or ipc://PATH"

    def parse(self, text: str) -> str:
        return self.check(text.strip())

    def check(self, value: Any) -> str:
        if not isinstance(value, str):
            raise ValueError(value)
        tcp = re.fullmatch(r"tcp://(\[[0-9A-Fa-f:.%\w]+\]|[\w.*-]+):(\d{1,5}|\*)", value)
        if tcp is None and not re.fullmatch(r"ipc://.{1,100}", value):
            raise ValueError(value)
        if tcp is not None and tcp[2] != "*" and int(tcp[2]) > 65535:
            raise ValueError(value)
        return value


@dataclass(frozen=True)
class Bytes(Kind):
    """A number of bytes, written with a unit."""

    low: int
    metavar = "SIZE"

    @property
    def allowed(self) -> str:
        units = "KiB, MiB, GiB, TiB, KB, MB, GB, TB"
        return f"a size such as 512MiB or 4GiB ({units}), at least {self.show(self.low)}"

    def parse(self, text: str) -> int:
        found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip().lower())
        if found is None or found[2] not in _UNITS:
            raise ValueError(text)
        return self.check(int(float(found[1]) * _UNITS[found[2]]))

    def check(self, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < self.low:
            raise ValueError(value)
        return value

    def show(self, value: Any) -> str:
        for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
            if value % unit == 0 and value:
                return f"{value // unit}{name}"
        return str(value)


@dataclass(frozen=True)
class FilePath(Kind):
    """A path; a leading ~ is the home directory."""

    metavar = "PATH"

    @property
    def allowed(self) -> str:
        return "a path"

    def parse(self, text: str) -> Path:
        return self.check(text)

    def check(self, value: Any) -> Path:
        if not isinstance(value, str | Path) or not str(value) or "\0" in str(value):
            raise ValueError(value)
        return Path(value).expanduser()


@dataclass(frozen=True)
class Auto(Kind):
    """Another kind, or the word "auto" (the value None): aioprefill chooses."""

    of: Kind
    word: str = AUTO

    @property
    def metavar(self) -> str:  # type: ignore[override]  # computed here, a constant elsewhere
        return self.of.metavar

    @property
    def allowed(self) -> str:
        return f"{self.of.allowed}, or {self.word}"

    def parse(self, text: str) -> Any:
        return None if text.strip().lower() == self.word else self.of.parse(text)

    def check(self, value: Any) -> Any:
        return None if value is None else self.of.check(value)

    def show(self, value: Any) -> str:
        return self.word if value is None else self.of.show(value)
