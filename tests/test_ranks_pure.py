"""Which rank a process is, and whom the beats blame: pure."""

from __future__ import annotations

import itertools

import msgspec
import pytest

from aioprefill.errors import ConfigError, HostError, RankError
from aioprefill.ranks.beats import Beat, BeatTable, Row
from aioprefill.ranks.place import RankPlace, on_one_machine, place_from_environment
from aioprefill.ranks.progress import RankProgress

TIMEOUT_S = 10.0
TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}


def test_a_launched_process_knows_its_place():
    """As torchrun says it, with LOCAL_WORLD_SIZE and without."""
    assert place_from_environment(TORCHRUN, 8) == RankPlace(5, 8, 1)
    others = {name: value for name, value in TORCHRUN.items() if name != "LOCAL_WORLD_SIZE"}
    assert place_from_environment(others, 8) == RankPlace(5, 8, 1)
    assert not RankPlace(5, 8, 1).leads and RankPlace(0, 8, 0).leads


@pytest.mark.parametrize("environ", [{}, {"RANK": "", "WORLD_SIZE": ""}, {"LOCAL_RANK": "3"}])
def test_without_a_launcher_there_is_no_place(environ):
    """Whatever --tp says: the caller starts the ranks itself, or is alone."""
    assert place_from_environment(environ, 1) is None
    assert place_from_environment(environ, 4) is None


def test_one_rank_alone_has_no_place():
    """torchrun with one process: no group is needed."""
    assert place_from_environment({"RANK": "0", "WORLD_SIZE": "1"}, 1) is None


@pytest.mark.parametrize(
    ("change", "tp", "text"),
    [
        ({"RANK": None}, 8, "RANK is not set"),
        ({"WORLD_SIZE": None}, 8, "WORLD_SIZE is not set"),
        ({"LOCAL_RANK": None}, 8, "LOCAL_RANK is not set"),
        ({"RANK": "five"}, 8, "RANK is 'five'"),
        ({"RANK": "-1"}, 8, "RANK is '-1'"),
        ({"RANK": "²"}, 8, "RANK is '²'"),
        ({"WORLD_SIZE": "8.0"}, 8, "WORLD_SIZE is '8.0'"),
        ({"LOCAL_RANK": "0x1"}, 8, "LOCAL_RANK is '0x1'"),
        ({"LOCAL_WORLD_SIZE": "four"}, 8, "LOCAL_WORLD_SIZE is 'four'"),
        ({}, 4, "WORLD_SIZE is 8, but --tp is 4"),
        ({}, 1, "WORLD_SIZE is 8, but --tp is 1"),
        ({"RANK": "8"}, 8, "RANK is 8, but WORLD_SIZE is 8"),
        ({"LOCAL_RANK": "4"}, 8, "LOCAL_RANK is 4, but LOCAL_WORLD_SIZE is 4"),
        ({"LOCAL_RANK": "8", "LOCAL_WORLD_SIZE": None}, 8, "LOCAL_RANK is 8, but WORLD_SIZE is 8"),
    ],
)
def test_a_wrong_variable_is_named(change, tp, text):
    """Missing, malformed, out of range, or against --tp."""
    environ = {name: value for name, value in {**TORCHRUN, **change}.items() if value is not None}
    with pytest.raises(ConfigError) as caught:
        place_from_environment(environ, tp)
    assert str(caught.value).startswith(text)


@pytest.mark.parametrize(
    ("environ", "local"),
    [
        ({"AIOPREFILL_RANK_STORE": "/x"}, True),
        ({"MASTER_ADDR": "127.0.0.1"}, True),
        ({"MASTER_ADDR": "localhost"}, True),
        ({"MASTER_ADDR": "node1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}, True),
        ({"MASTER_ADDR": "node1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}, False),
        ({"MASTER_ADDR": "10.0.0.1", "WORLD_SIZE": "8"}, False),
        ({}, False),
    ],
)
def test_what_is_known_to_be_one_machine(environ, local):
    """Only then do sockets stay on loopback."""
    assert on_one_machine(environ) is local


def test_a_rank_error_names_rank_forward_and_cause():
    """And it is what open requests are answered with when the host cannot go on."""
    error = RankError(2, "is gone", forward=7)
    assert str(error) == "rank 2 is gone (forward 7)" and (error.rank, error.forward) == (2, 7)
    assert isinstance(error, HostError) and error.code == "rank"
    assert str(RankError(0, "is gone")) == "rank 0 is gone"
    assert str(RankError(0, "sits in forward 3", forward=3)) == "rank 0 sits in forward 3"


class World:
    """A table, its clock, and beats that say that all is well unless told otherwise."""

    def __init__(self, own: int = 0, size: int = 3) -> None:
        self.now = 100.0
        self.size = size
        self.table = BeatTable(own, size, beat_s=1.0, now=self.now)
        self._sequence = itertools.count()

    def beat(self, rank: int, **facts) -> Beat:
        return Beat(rank=rank, sequence=next(self._sequence), **facts)

    def hear(self, rank: int, **facts) -> None:
        self.table.hear(self.beat(rank, **facts), self.now)

    def hear_all(self, *but: int, **facts) -> None:
        for rank in range(self.size):
            if rank not in but:
                self.hear(rank, **facts)

    def suspect(self, forward: int | None = None) -> str:
        first = self.table.suspect(self.now, TIMEOUT_S, forward)
        again = self.table.suspect(self.now, TIMEOUT_S, forward)
        assert str(first) == str(again)
        return "" if first is None else str(first)


def test_nobody_is_suspected_while_all_beat():
    """For an hour, idle: nothing is executed or voted on."""
    world = World()
    for _ in range(3600):
        world.now += 1.0
        world.hear_all()
        assert world.suspect() == ""


def test_R2_silence_is_named_after_the_timeout_and_the_longest_one_first():
    """Rank 2 falls silent a second before rank 1."""
    world = World()
    world.hear_all()
    world.now += 1.0
    world.hear(1)
    world.now += TIMEOUT_S - 1.0
    assert world.suspect() == ""
    world.now += 0.5
    assert world.suspect(forward=4) == (
        "rank 2 has been silent for 10 s: its process is stopped, dead or unreachable (forward 4)"
    )


def test_R2_a_rank_that_was_never_heard_is_named_so():
    """It has the timeout from the start on."""
    world = World()
    world.hear_all(1)
    world.now += TIMEOUT_S
    world.hear_all(1)
    assert world.suspect() == ""
    world.now += 0.1
    assert world.suspect() == (
        "rank 1 has been silent for 10 s: it was never heard, so it hangs in its start or cannot be reached"
    )


def test_R2_a_closed_connection_without_a_farewell_is_a_death():
    """Also when another rank is silent for longer; its last words are told."""
    world = World()
    world.hear(1)
    world.now += 2 * TIMEOUT_S
    world.table.close(2)
    assert world.suspect(9) == "rank 2 has closed its connection: its process ended (forward 9)"
    world.hear(2, error="cudaErrorIllegalAddress")
    assert world.suspect() == "rank 2 failed: cudaErrorIllegalAddress"


def test_a_farewell_is_no_death():
    """Nor are silence, a closed connection, and what the rank has not done, after it."""
    world = World()
    world.hear_all()
    world.hear(1, leaving=True)
    world.table.close(1)
    for _ in range(30):
        world.now += 1.0
        world.hear(0, executed=5, voted=2, voted_s=30.0)
        world.hear(2, executed=5, voted=2, voted_s=29.0)
        assert world.suspect() == ""


def test_a_rank_that_fails_by_its_own_word_is_named_also_after_its_farewell():
    """But a death or silence is the cause, and the error of another rank may be its consequence."""
    world = World()
    world.hear_all()
    world.hear(1, error="rank 2 is gone", leaving=True)
    assert world.suspect() == "rank 1 failed: rank 2 is gone"
    world.table.close(2)
    assert world.suspect().startswith("rank 2 has closed")
    assert World(own=1).table.suspect(100.0, TIMEOUT_S, None) is None


def test_R2_a_rank_that_fails_by_the_fault_of_another_one_has_that_one_named():
    """Once, whoever tells of it: also by the one at fault."""
    world = World()
    world.hear_all()
    world.hear(1, error="rank 2 sent what is no token (forward 3)", blames=2)
    assert world.suspect(5) == "rank 2 sent what is no token (forward 3)"
    world = World()
    world.hear_all()
    world.hear(2, error="rank 2 failed: never submitted", blames=2)
    assert world.suspect(5) == "rank 2 failed: never submitted"


def test_an_own_error_is_not_held_against_oneself():
    """The rank knows already; the others name it."""
    world = World(own=1)
    world.hear_all(error="out of memory")
    assert world.suspect() == "rank 0 failed: out of memory"
    world.hear_all(1)
    assert world.suspect() == ""


def test_R2_a_host_call_that_does_not_end_is_named():
    """On the rank itself too: its watch thread goes on."""
    for own in range(3):
        world = World(own=own)
        world.hear_all(1, executed=8)
        world.hear(1, executed=7, call="process_result", call_s=61.0, turned_s=61.5)
        assert world.suspect(3) == "rank 1 has been in the host call process_result for 61 s (forward 3)"


def test_R2_a_loop_that_does_not_turn_is_named():
    """Outside a host call, or in many short ones."""
    world = World()
    world.hear_all(2)
    world.hear(2, turned_s=12.0)
    assert world.suspect() == "rank 2 has not turned its event loop for 12 s"
    world.hear(2, turned_s=12.0, call="prepare", call_s=0.1)
    assert world.suspect() == "rank 2 has not turned its event loop for 12 s"
    world.hear(2, turned_s=10.4, call="prepare", call_s=9.9)
    assert world.suspect() == "rank 2 has been in the host call prepare for 9.9 s"


def test_R2_ranks_that_wait_inside_a_host_call_are_not_blamed_for_the_one_that_does_not_come():
    """A collective inside the call: ranks 0 and 1 sit in it."""
    for facts in ({"executed": 40}, {"executed": 41}):
        world = World()
        for rank in (0, 1):
            world.hear(rank, executed=41, call="ingest", call_s=11.0, turned_s=11.0)
        world.hear(2, **facts)
        assert world.suspect() == (
            "rank 2 has not come to the host call ingest that rank 0 has been in for 11 s"
        )


def test_of_several_ranks_in_host_calls_the_one_least_far_is_named():
    """With equal progress the one that has been in it for longest; the others are told of."""
    world = World()
    world.hear(0, executed=41, call="ingest", call_s=11.0)
    world.hear(1, executed=40, call="prepare", call_s=11.0)
    world.hear(2, executed=41, call="ingest", call_s=12.0)
    assert world.suspect() == "rank 1 has been in the host call prepare for 11 s; stuck as well: 0, 2"
    world.hear(1, executed=41, call="ingest", call_s=11.0)
    assert world.suspect() == "rank 2 has been in the host call ingest for 12 s; stuck as well: 0, 1"


def test_nobody_is_blamed_for_waiting_while_a_rank_is_overdue():
    """Rank 0 sits in a collective because rank 2 is stopped: rank 2 is named when its time is up."""
    world = World()
    world.hear_all()
    for second in range(1, 11):
        world.now += 1.0
        world.hear(0, call="ingest", call_s=second + 0.5)
        world.hear(1)
        assert world.suspect() == "", second
    world.now += 0.5
    assert world.suspect().startswith("rank 2 has been silent")


def test_R2_the_rank_that_does_not_join_a_vote_is_named():
    """Ranks 0 and 2 have joined; the first of them is told of."""
    world = World()
    world.hear(0, voted=12, voted_s=60.0)
    world.hear(1, voted=11, voted_s=80.0)
    world.hear(2, voted=12, voted_s=50.0)
    assert world.suspect(13) == "rank 1 has not joined the vote on forward 12 that rank 0 joined 60 s ago"
    error = world.table.suspect(world.now, TIMEOUT_S, None)
    assert error is not None and (error.rank, error.forward) == (1, 12)


def test_a_vote_is_late_only_by_a_beat_that_was_sent_after_the_timeout():
    """The last beat is a second old: the rank may have joined since."""
    world = World()
    world.hear(1, voted=11)
    world.hear(2, voted=12)
    world.now += 1.0
    world.hear(0, voted=12, voted_s=10.5)
    assert world.suspect() == ""
    world.hear(1, voted=12)
    world.now += 1.0
    world.hear_all(1, voted=12, voted_s=11.5)
    assert world.suspect() == ""


def test_R2_a_rank_that_does_not_follow_the_order_is_named():
    """It beats and is in no call, but carries nothing out; one that follows late is not."""
    world = World()
    for second in range(30):
        world.hear(0, executed=10 * second)
        world.hear(1, executed=10 * second)
        world.hear(2, executed=max(0, 10 * (second - 8)))
        assert world.suspect() == ""
        world.now += 1.0
    for second in range(30, 60):
        world.hear_all(2, executed=10 * second)
        world.hear(2, executed=210)
        found = world.suspect()
        if found:
            break
        world.now += 1.0
    assert found.startswith("rank 2 has not carried out host call ") and second <= 30 + TIMEOUT_S + 2


def test_beats_that_come_late_or_twice_are_ignored():
    """An older one does not undo a newer one."""
    world = World()
    old, new = world.beat(1, error="old"), world.beat(1)
    world.table.hear(new, world.now)
    world.table.hear(old, world.now)
    world.table.hear(new, world.now + 5)
    assert world.suspect() == ""
    world.now += TIMEOUT_S + 1
    world.hear(2)
    assert world.suspect().startswith("rank 1 has been silent for 11 s")


def test_first_and_last_words_and_errors_are_worth_telling_at_once():
    """Beats that say nothing new are not."""
    world = World()
    for facts, urgent in (
        ({}, True),
        ({}, False),
        ({"voted": 3, "call": "ingest"}, False),
        ({"error": "x"}, True),
        ({"error": "x"}, False),
        ({"error": "x", "leaving": True}, True),
    ):
        assert world.table.hear(world.beat(1, **facts), world.now) is urgent, facts
    assert world.table.hear(Beat(rank=1, sequence=-1, error="late"), world.now) is False


def test_nothing_is_concluded_from_a_rank_that_does_not_tell_what_it_has_executed():
    """Neither that it is behind, nor that others wait for it."""
    world = World()
    for second in range(30):
        world.now += 1.0
        world.hear(0)
        world.hear_all(0, executed=second)
        assert world.suspect() == ""
    world.hear(1, executed=28, call="prepare", call_s=11.0)
    assert world.suspect() == "rank 1 has been in the host call prepare for 11 s"


class Relayed:
    """Rank 0's table, and that of rank 1, whose clock reads 1,000 s more."""

    def __init__(self) -> None:
        self.leader, self.follower = World(0), World(1)
        self.follower.now = self.leader.now + 1000
        self.follower.table = BeatTable(1, 3, beat_s=1.0, now=self.follower.now)

    def go(self, seconds: float) -> None:
        self.leader.now += seconds
        self.follower.now += seconds

    def relay(self) -> None:
        self.leader.hear(0)
        data = msgspec.msgpack.encode(self.leader.table.rows(self.leader.now))
        self.follower.table.relay(msgspec.msgpack.decode(data, type=list[Row]), self.follower.now)


def test_R2_a_follower_names_a_third_rank_by_what_rank_0_tells():
    """Silent, closed and failed; clocks of machines differ."""
    for end, text in (
        ("silent", "silent for 10 s"),
        ("closed", "closed its connection"),
        ("error", "failed: x"),
    ):
        relayed = Relayed()
        relayed.leader.hear_all()
        relayed.relay()
        assert relayed.follower.suspect() == ""
        if end == "silent":
            relayed.go(TIMEOUT_S + 0.1)
            relayed.leader.hear(1)
        elif end == "closed":
            relayed.leader.table.close(2)
        else:
            relayed.leader.hear(2, error="x")
        relayed.relay()
        for world in (relayed.leader, relayed.follower):
            assert world.suspect().startswith("rank 2") and text in world.suspect()


def test_R2_a_follower_that_hears_nothing_names_rank_0_and_nobody_behind_it():
    """What rank 0 said of rank 2 gets old with it."""
    relayed = Relayed()
    relayed.leader.hear_all(2)
    relayed.go(2.0)
    relayed.leader.hear(1)
    relayed.relay()
    relayed.go(TIMEOUT_S + 0.1)
    assert relayed.follower.suspect().startswith("rank 0 has been silent for 10 s")
    relayed.follower.table.close(0)
    assert relayed.follower.suspect().startswith("rank 0 has closed")


def test_a_follower_does_not_take_the_word_of_rank_0_on_itself_or_rank_0():
    """Its own end of a connection counts; a table of another size is refused."""
    relayed = Relayed()
    relayed.leader.hear_all()
    relayed.leader.table.close(1)
    relayed.leader.table.close(0)
    relayed.relay()
    assert relayed.follower.suspect() == ""
    with pytest.raises(ValueError, match=r"shorter|longer"):
        relayed.follower.table.relay([], relayed.follower.now)


def test_a_process_that_did_not_run_blames_nobody_for_its_own_silence():
    """Stopped for a minute and continued: the others get the time that was left."""
    world = World()
    world.hear_all()
    world.now += 5.0
    world.now += 60.0
    world.table.excuse(60.0)
    assert world.suspect() == ""
    world.now += 5.1
    assert world.suspect() != ""


def test_a_beat_says_how_far_its_rank_has_come():
    """Times are those since; a call that ended is no longer told."""
    now = [50.0]
    progress = RankProgress(lambda: now[0])
    progress.turn()
    now[0] += 1
    progress.join_vote(3)
    progress.forward = 4
    now[0] += 1
    progress.begin_call("prepare")
    now[0] += 2
    assert progress.beat(1, 7) == Beat(
        rank=1, sequence=7, turned_s=4, call="prepare", call_s=2, voted=3, voted_s=3, executed=-1
    )
    assert repr(progress) == "<RankProgress executed=-1 voted=3 forward=4 call=prepare>"
    progress.end_call(9)
    progress.error = "out of memory"
    assert progress.beat(1, 8, leaving=True) == Beat(
        rank=1,
        sequence=8,
        turned_s=4,
        voted=3,
        voted_s=3,
        executed=9,
        error="out of memory",
        leaving=True,
    )
