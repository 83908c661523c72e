"""What a schedule tells, counts and complains of."""

from __future__ import annotations

import asyncio
from collections import Counter

import msgspec


class Violation(AssertionError):
    """A rule was broken."""


class Story:
    """One schedule's lines and counters. Lines are kept only where somebody wants to read them."""

    def __init__(self, *, told: bool = False) -> None:
        self.told = told
        self.lines: list[str] = []
        self.counters: Counter[str] = Counter()
        self.events = 0
        """Things that happened from outside, and ends of forwards and transfers."""
        self.breaking = False
        """The loop is meant to stop with an error."""
        self.violation: str | None = None
        """The first rule that was broken."""

    def tell(self, who: str, what: str) -> None:
        """One line, with the time. Callers that have to put `what` together ask `told` first."""
        if self.told:
            self.lines.append(f"{asyncio.get_running_loop().time():9.4f}  {who:<6} {what}")

    def event(self, kind: str, what: str = "") -> None:
        """Something has happened."""
        self.events += 1
        self.counters[kind] += 1
        if self.told:
            self.tell("", f"-- {kind} {what}".rstrip())

    def count(self, name: str) -> None:
        """Something was reached."""
        self.counters[name] += 1

    def violate(self, what: str) -> Violation:
        """A rule is broken: the error to raise. The first one is the one that counts."""
        if self.violation is None:
            self.violation = what
            self.tell("", f"!! {what}")
        return Violation(what)


def in_words(kind: str, description: bytes) -> str:
    """What a host call came to, as far as there is something to say."""
    if not description:
        return ""
    came = msgspec.msgpack.decode(description)
    if isinstance(came, dict):
        return "".join(f" {name}={value}" for name, value in came.items() if value)
    if kind == "prepare":
        return "".join(f" {name}[{start}:{end}]" for name, start, end, *_ in came)
    return f" {came}" if came else ""
