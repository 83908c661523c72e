"""Facts in words. Pure."""

from __future__ import annotations

from typing import NamedTuple

from aioprefill.native.facts import (
    AbortFact,
    ArrivalFact,
    CommandFact,
    Fact,
    GrammarFact,
    OutputsFact,
    StageFact,
    SwappedFact,
    TransferFact,
    UnstageFact,
    WithdrawnFact,
)


class Part(NamedTuple):
    """One thing that a call did or saw."""

    text: str
    requests: tuple[str, ...] = ()
    """Those that it concerns."""
    prefix: str | None = None
    """It concerns all requests whose ids begin so, too."""

    def concerns(self, request_id: str) -> bool:
        """It is about this request."""
        return request_id in self.requests or (self.prefix is not None and request_id.startswith(self.prefix))


def fact_part(fact: Fact) -> Part:
    """A fact in words."""
    match fact:
        case ArrivalFact():
            return Part(_arrival(fact), (fact.request_id,))
        case AbortFact():
            return Part(f"abort {fact.request_id}: {fact.reason}", (fact.request_id,))
        case CommandFact():
            return _command(fact)
        case WithdrawnFact():
            return Part(f"command {fact.number} is withdrawn")
        case GrammarFact():
            came_to = "is compiled" if fact.error is None else f"failed: {fact.error.message}"
            return Part(f"grammar of {fact.request_id} {came_to}", (fact.request_id,))
        case StageFact():
            return Part(f"weights {fact.number} are read from {fact.folder}")
        case UnstageFact():
            return Part(f"weights {fact.number} are dropped")
        case SwappedFact():
            return Part("weights are swapped" if fact.error is None else f"weights not swapped: {fact.error}")
        case TransferFact():
            reason = f" ({fact.reason})" if fact.reason else ""
            released = ", released" if fact.released else ""
            state = fact.state.value.replace("_", " ")
            return Part(f"transfer {fact.room} {state}{reason}{released}", (fact.room,))
        case OutputsFact():
            return Part(f"forward {fact.number} sampled")


def _arrival(fact: ArrivalFact) -> str:
    told = [f"{len(fact.tokens) // 4} tokens", f"for {fact.peer}" if fact.peer else "no peer"]
    if fact.grammar is not None:
        told.append(fact.grammar.kind)
    if fact.priority:
        told.append(f"priority {fact.priority}")
    if fact.deadline_s is not None:
        told.append(f"due in {fact.deadline_s:g} s")
    return f"arrival {fact.request_id} ({', '.join(told)})"


def _command(fact: CommandFact) -> Part:
    text = f"command {fact.number}: {fact.name}"
    match fact.name:
        case "Pause":
            return Part(f"{text} {fact.mode}")
        case "UpdateWeights":
            return Part(f"{text} {fact.staged}")
        case "AbortMatching" if fact.exact:
            return Part(f"{text} {fact.prefix}: {fact.reason}", (fact.prefix,))
        case "AbortMatching":
            return Part(f"{text} {fact.prefix}*: {fact.reason}", prefix=fact.prefix)
    return Part(text)
