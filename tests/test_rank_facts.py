"""What ranks know of their own shards, put together; and inputs as facts and back."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from aioprefill.control import AbortMatching, FlushCache, Pause, PauseMode, Resume, UpdateWeights
from aioprefill.errors import RankError
from aioprefill.grammar_spec import GrammarSpec
from aioprefill.native.fact_codec import fact_of, input_of
from aioprefill.native.facts import (
    AbortFact,
    CommandFact,
    ErrorFact,
    Fact,
    GrammarFact,
    StagedFact,
    SwappedFact,
    TransferFact,
    WithdrawnFact,
    decode_facts,
    decode_local,
    encode_facts,
    encode_local,
)
from aioprefill.native.frontend import Arrival, Controlled
from aioprefill.native.rank_facts import RankFacts
from aioprefill.request import PrefillRequest, Timeouts
from aioprefill.sampling_params import SamplingParams
from aioprefill.testing.clock import virtual_time
from aioprefill.transfer.port import TransferState

READY = TransferFact("r", TransferState.WAITING_FOR_INPUT)
DONE = TransferFact("r", TransferState.SUCCESS, released=True)
BROKEN = TransferFact("r", TransferState.FAILED, "gone")
FREE = TransferFact("r", TransferState.FAILED, "gone", released=True)


def heard(facts: RankFacts, *reports: tuple[int, TransferFact]) -> list[tuple[str, bool]]:
    """What comes out: states, and whether released."""
    out = []
    for rank, report in reports:
        known = facts.take(rank, report)
        if isinstance(known, TransferFact):
            out.append((known.state.name, known.released))
    return out


def test_a_room_is_ready_and_done_when_it_is_on_every_rank() -> None:
    """In whatever order the ranks report."""
    for order in itertools.permutations(range(3)):
        facts = RankFacts(3)
        assert heard(facts, *((rank, READY) for rank in order[:2])) == []
        assert heard(facts, (order[2], READY)) == [("WAITING_FOR_INPUT", False)]
        assert heard(facts, *((rank, DONE) for rank in order[:2])) == []
        assert heard(facts, (order[2], DONE)) == [("SUCCESS", True)]
        assert facts.rooms == 0


def test_one_failed_shard_fails_the_room_at_once_and_it_is_released_when_all_are() -> None:
    """The others may still be written; the reason names the rank."""
    facts = RankFacts(3)
    known = facts.take(1, BROKEN)
    assert isinstance(known, TransferFact)
    assert known.reason == "gone (rank 1)" and known.state is TransferState.FAILED and not known.released
    assert heard(facts, (0, DONE), (2, FREE)) == []
    assert facts.rooms == 1
    assert heard(facts, (1, FREE)) == [("FAILED", True)]
    assert facts.rooms == 0


def test_a_room_that_failed_on_one_rank_is_not_ready_any_more() -> None:
    """Even when all ranks have said so by then."""
    facts = RankFacts(2)
    assert heard(facts, (0, READY), (0, BROKEN), (1, READY)) == [("FAILED", False)]


def test_a_room_that_was_abandoned_everywhere_is_released_once() -> None:
    """Each rank reports its own release."""
    facts = RankFacts(2)
    assert heard(facts, (0, FREE), (1, FREE)) == [("FAILED", False), ("FAILED", True)]


def test_a_name_may_come_back() -> None:
    """What was known of its predecessor is forgotten."""
    facts = RankFacts(2)
    heard(facts, (0, BROKEN), (0, FREE), (1, FREE))
    assert heard(facts, (0, READY), (1, READY)) == [("WAITING_FOR_INPUT", False)]


def test_weights_are_swapped_when_they_are_on_every_rank() -> None:
    """Failed on all is a failure; failed on some leaves ranks with different weights."""
    facts = RankFacts(2)
    assert facts.take(0, SwappedFact()) is None
    assert facts.take(1, SwappedFact()) == SwappedFact(None)
    assert facts.take(0, SwappedFact("broke")) is None
    assert facts.take(1, SwappedFact("broke")) == SwappedFact("broke")
    facts.take(0, SwappedFact())
    with pytest.raises(RankError, match="on some ranks only"):
        facts.take(1, SwappedFact("broke"))


def test_weights_are_staged_when_every_rank_has_read_them() -> None:
    """One that could not speaks for all."""
    facts = RankFacts(2)
    assert facts.take(1, StagedFact(0)) is None
    assert facts.take(0, StagedFact(1)) is None
    assert facts.take(0, StagedFact(0)) == StagedFact(0)
    bad = StagedFact(1, ErrorFact("model", "no"))
    assert facts.take(1, bad) == bad


@virtual_time
async def test_every_input_survives_the_way_to_another_rank() -> None:
    """Nobody waits for it there."""
    request = PrefillRequest(
        [1, 2, 3],
        request_id="a",
        peer="tcp://127.0.0.1:1",
        sampling=SamplingParams(temperature=0.5, seed=3),
        max_new_tokens=7,
        ignore_eos=True,
        grammar=GrammarSpec("regex", "[a-z]"),
        timeouts=Timeouts(queue_s=1.5),
        priority=-2,
        deadline_s=9.0,
    )
    arrival = Arrival.elsewhere(request, np.array([1, 2, 3], dtype=np.uint32), 12.5)
    commands = [
        Pause(PauseMode.RETRACT),
        Resume(),
        UpdateWeights(4),
        FlushCache(),
        AbortMatching("x", "why", exact=True),
    ]
    facts: list[Fact] = [
        fact_of(arrival),
        *(fact_of(Controlled.elsewhere(number, command)) for number, command in enumerate(commands)),
        AbortFact("a", "because"),
        WithdrawnFact(2),
        GrammarFact("a", 0, b"\x01\x00\x00\x00", None),
        TransferFact("r", TransferState.FAILED, "x", released=True),
    ]
    back = decode_facts(encode_facts(facts))
    assert back == facts
    first, *rest = map(input_of, back)
    assert isinstance(first, Arrival) and first.arrival_s == 12.5
    assert first.tokens.tolist() == [1, 2, 3] and first.tokens.dtype == np.uint32
    for name in ("request_id", "peer", "sampling", "max_new_tokens", "ignore_eos", "grammar", "timeouts"):
        assert getattr(first.request, name) == getattr(request, name)
    assert (first.request.priority, first.request.deadline_s) == (-2, 9.0)
    assert [item.command for item in rest if isinstance(item, Controlled)] == commands
    assert rest[len(commands) :] == facts[1 + len(commands) :]
    assert encode_facts([]) == b""


def test_a_command_of_another_version_is_refused() -> None:
    """Rather than guessed."""
    with pytest.raises(ValueError, match="no command is called 'Explode'"):
        input_of(CommandFact(0, "Explode"))


@pytest.mark.parametrize("fact", [DONE, SwappedFact("x"), StagedFact(3, ErrorFact("model", "m", "f"))])
def test_what_one_rank_knows_survives_the_report(fact: TransferFact | SwappedFact | StagedFact) -> None:
    """Of each kind."""
    assert decode_local(encode_local(fact)) == fact
