"""Inputs as facts for other ranks, and back. Pure."""

from __future__ import annotations

import numpy as np

from aioprefill.control import AbortMatching, Command, FlushCache, Pause, PauseMode, Resume, UpdateWeights
from aioprefill.native.facts import ArrivalFact, CommandFact, Fact, OutputsFact
from aioprefill.native.frontend import Arrival, Controlled, Input
from aioprefill.request import PrefillRequest


def fact_of(item: Input) -> Fact:
    """The fact that brings an input to another rank."""
    if isinstance(item, Arrival):
        request = item.request
        return ArrivalFact(
            request_id=request.request_id,
            tokens=item.tokens.astype("<u4", copy=False).tobytes(),
            arrival_s=item.arrival_s,
            peer=request.peer,
            sampling=request.sampling,
            max_new_tokens=request.max_new_tokens,
            ignore_eos=request.ignore_eos,
            grammar=request.grammar,
            timeouts=request.timeouts,
            priority=request.priority,
            deadline_s=request.deadline_s,
        )
    if isinstance(item, Controlled):
        return _command_fact(item.number, item.command)
    return item


def _command_fact(number: int, command: Command) -> CommandFact:
    name = type(command).__name__
    match command:
        case Pause(mode):
            return CommandFact(number, name, mode=mode.value)
        case UpdateWeights(staged):
            return CommandFact(number, name, staged=staged)
        case AbortMatching(prefix, reason, exact):
            return CommandFact(number, name, prefix=prefix, reason=reason, exact=exact)
        case Resume() | FlushCache():
            return CommandFact(number, name)


def input_of(fact: Fact) -> Input:
    """The input that a fact brings. Nobody here waits for its outcome."""
    if isinstance(fact, ArrivalFact):
        tokens = np.frombuffer(fact.tokens, dtype="<u4").astype(np.uint32, copy=False)
        request = PrefillRequest(
            tokens,
            request_id=fact.request_id,
            peer=fact.peer,
            sampling=fact.sampling,
            max_new_tokens=fact.max_new_tokens,
            ignore_eos=fact.ignore_eos,
            grammar=fact.grammar,
            timeouts=fact.timeouts,
            priority=fact.priority,
            deadline_s=fact.deadline_s,
        )
        return Arrival.elsewhere(request, tokens, fact.arrival_s)
    assert not isinstance(fact, OutputsFact), "what a forward has sampled is no input"
    if isinstance(fact, CommandFact):
        return Controlled.elsewhere(fact.number, _command(fact))
    return fact


def _command(fact: CommandFact) -> Command:
    match fact.name:
        case "Pause":
            return Pause(PauseMode(fact.mode))
        case "Resume":
            return Resume()
        case "UpdateWeights":
            return UpdateWeights(fact.staged)
        case "FlushCache":
            return FlushCache()
        case "AbortMatching":
            return AbortMatching(fact.prefix, fact.reason, fact.exact)
        case name:
            raise ValueError(f"no command is called {name!r}")
