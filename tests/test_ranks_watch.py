"""The watch names a rank that dies, hangs or falls silent: three real processes, real threads and sockets."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
import zmq
from ranks_support import FakeGroup, groups
from wire_support import LOOPS, run, wait_until

from aioprefill.errors import RankError
from aioprefill.ranks.progress import RankProgress
from aioprefill.ranks.watch import Watch

__all__ = ["run"]

SCRIPT = str(Path(__file__).with_name("ranks_process.py"))
BEAT_S, TIMEOUT_S, GRACE_S = 0.1, 1.0, 0.3


class RankProcess:
    """One rank of `ranks_process.py watch`."""

    def __init__(self, rank: int, process: asyncio.subprocess.Process) -> None:
        self.rank = rank
        self._process = process

    @classmethod
    async def start(cls, rank: int, size: int, folder: Path, timeout_s: float, beat_s: float) -> RankProcess:
        """Use `end` in the end."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            SCRIPT,
            "watch",
            str(folder),
            *map(str, (rank, size, timeout_s, beat_s, GRACE_S)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        return cls(rank, process)

    async def line(self, kind: str) -> tuple[float, str]:
        """The next line, which must be of this kind; when it was said, if that is told, and its text."""
        assert self._process.stdout is not None
        line = (await self._process.stdout.readline()).decode().strip()
        first, _, rest = line.partition(" ")
        assert first == kind, f"rank {self.rank} said {line!r}, not {kind}"
        if kind in ("lost", "stuck"):
            at, _, text = rest.partition(" ")
            return float(at), text
        return 0.0, rest

    def do(self, word: str) -> None:
        """Have it act."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{word}\n".encode())

    def signal(self, number: int) -> None:
        """Send a signal."""
        self._process.send_signal(number)

    async def wait(self) -> int:
        """Its exit code."""
        return await self._process.wait()

    async def end(self) -> None:
        """At once."""
        if self._process.returncode is None:
            self._process.kill()
        await self._process.communicate()


@asynccontextmanager
async def three(
    folder: Path, timeout_s: float = TIMEOUT_S, beat_s: float = BEAT_S
) -> AsyncIterator[list[RankProcess]]:
    """Three ranks that hear each other."""
    async with AsyncExitStack() as stack, asyncio.timeout(60):
        ranks = []
        for rank in range(3):
            ranks.append(await RankProcess.start(rank, 3, folder, timeout_s, beat_s))
            stack.push_async_callback(ranks[-1].end)
        for rank in ranks:
            await rank.line("hears")
        yield ranks


async def named(ranks: list[RankProcess], but: int, since: float, within_s: float) -> list[str]:
    """What each rank but one says of the lost one, which it does in time."""
    texts = []
    for rank in ranks:
        if rank.rank != but:
            at, text = await rank.line("lost")
            assert at - since < within_s, f"rank {rank.rank} said so after {at - since:.2f} s: {text}"
            texts.append(text)
    return texts


@pytest.mark.asyncio
@pytest.mark.parametrize("victim", [0, 1, 2])
async def test_R2_a_killed_rank_is_named_by_the_others_at_once(victim: int, tmp_path: Path) -> None:
    """While idle; long before its beats are missed."""
    async with three(tmp_path, timeout_s=30, beat_s=10) as ranks:
        since = time.monotonic()
        ranks[victim].signal(signal.SIGKILL)
        texts = await named(ranks, victim, since, 1.0)
        assert texts == 2 * [f"rank {victim} has closed its connection: its process ended (forward 3)"]


@pytest.mark.asyncio
@pytest.mark.parametrize("victim", [0, 1, 2])
async def test_R2_a_stopped_rank_is_named_by_the_others_within_the_timeout_and_a_beat(
    victim: int, tmp_path: Path
) -> None:
    """SIGSTOP breaks no connection."""
    async with three(tmp_path) as ranks:
        since = time.monotonic()
        ranks[victim].signal(signal.SIGSTOP)
        texts = await named(ranks, victim, since, TIMEOUT_S + BEAT_S + 0.3)
        for text in texts:
            assert text.startswith(f"rank {victim} has been silent for 1.")


@pytest.mark.asyncio
@pytest.mark.parametrize("victim", [0, 1, 2])
async def test_R2_a_rank_whose_loop_sits_in_a_host_call_is_named_and_leaves(
    victim: int, tmp_path: Path
) -> None:
    """By the others on their loops; by itself in the watch thread, which then ends the process."""
    async with three(tmp_path) as ranks:
        since = time.monotonic()
        ranks[victim].do("sit")
        texts = await named(ranks, victim, since, TIMEOUT_S + 3 * BEAT_S + 0.3)
        await ranks[victim].line("does")
        at, text = await ranks[victim].line("stuck")
        assert at - since < TIMEOUT_S + GRACE_S + 3 * BEAT_S + 0.3
        for told in (*texts, text):
            assert told.startswith(f"rank {victim} has been in the host call process_result for ")
        assert await ranks[victim].wait() == 3


@pytest.mark.asyncio
async def test_R2_a_rank_that_fails_tells_why_and_is_named_with_that(tmp_path: Path) -> None:
    """At once, not with its next beat; and its end afterwards changes nothing."""
    async with three(tmp_path, timeout_s=30, beat_s=10) as ranks:
        since = time.monotonic()
        ranks[1].do("fail")
        texts = await named(ranks, 1, since, 1.0)
        assert texts == 2 * ["rank 1 failed: its device is lost (forward 3)"]
        ranks[1].signal(signal.SIGKILL)
        await ranks[1].wait()
        for rank in (ranks[2], ranks[0]):
            rank.do("leave")
            await rank.line("does")
            await rank.line("cpu")  # nothing else was said
            assert await rank.wait() == 0


@pytest.mark.asyncio
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
async def test_ranks_that_leave_in_order_are_not_taken_for_dead(
    order: tuple[int, ...], tmp_path: Path
) -> None:
    """Whoever is first; the others watch on, and name a rank that is killed later."""
    async with three(tmp_path) as ranks:
        for number in order:
            ranks[number].do("leave")
            await ranks[number].line("does")
            await ranks[number].line("cpu")
            assert await ranks[number].wait() == 0


@pytest.mark.asyncio
async def test_after_a_farewell_the_others_are_watched_on(tmp_path: Path) -> None:
    """Rank 1 leaves, rank 2 is killed."""
    async with three(tmp_path) as ranks:
        ranks[1].do("leave")
        assert await ranks[1].wait() == 0
        since = time.monotonic()
        ranks[2].signal(signal.SIGKILL)
        at, text = await ranks[0].line("lost")
        assert text.startswith("rank 2 has closed") and at - since < 1.0


class Told:
    """A watch of one rank, in this process, and what it tells."""

    def __init__(self, group: FakeGroup, **options: float) -> None:
        self.lost: list[RankError] = []
        self.stuck: list[RankError] = []
        self.progress = RankProgress()
        times = {"timeout_s": TIMEOUT_S, "beat_s": BEAT_S, "grace_s": GRACE_S, **options}
        self.watch = Watch(
            group, self.progress, on_lost=self.lost.append, on_stuck=self.stuck.append, **times
        )

    def heard(self, rank: int) -> bool:
        """This rank has heard that one."""
        return self.watch._table._ranks[rank].beat is not None


@asynccontextmanager
async def watched(size: int, **options: float) -> AsyncIterator[list[Told]]:
    """All ranks in this process, hearing each other."""
    with groups(size) as made:
        told = [Told(group, **options) for group in made]
        try:
            for one in told:
                one.watch.start()
            await wait_until(
                lambda: all(one.heard(rank) for one in told for rank in range(size)), "first beats"
            )
            yield told
        finally:
            for one in reversed(told):
                await one.watch.aclose()
                await one.watch.aclose()


@LOOPS
def test_nobody_is_named_while_all_is_well(run):
    """Fifty beats; the loop is seen to turn, and ends are orderly."""

    async def scenario():
        async with watched(3, beat_s=0.02, timeout_s=0.5) as told:
            await wait_until(lambda: all(one.watch._sequence > 50 for one in told), "fifty beats")
            assert all(time.monotonic() - one.progress.turned_at < 0.5 for one in told)
            assert "watching" in repr(told[1].watch)
        assert not any(one.lost or one.stuck for one in told)

    run(scenario())


def test_R2_a_missing_vote_is_named_on_every_rank(run):
    """Ranks 0 and 1 have joined the vote on forward 12, rank 2 goes on with other things."""

    async def scenario():
        async with watched(3) as told:
            for one in told:
                one.progress.join_vote(11)
            for one in told[:2]:
                one.progress.join_vote(12)
            await wait_until(lambda: all(one.lost for one in told), "an error on every rank")
            for one in told:
                (error,) = one.lost
                assert (error.rank, error.forward) == (2, 12) and not one.stuck
                assert str(error).startswith("rank 2 has not joined the vote on forward 12 that rank ")
            assert "rank 2 has not" in repr(told[0].watch)

    run(scenario())


def test_R2_a_loop_that_reacts_late_is_told_or_the_thread_is_but_not_both(run):
    """The loop blocks for longer than the grace when rank 1 ends; then it turns again."""

    async def scenario():
        async with watched(2, timeout_s=30) as (first, second):
            second.watch._wire.tell = lambda beat, rows: None  # no farewell
            stuck = threading.Event()
            first.stuck = Setting(stuck)
            first.watch._on_stuck = first.stuck.append
            second.watch.stop()
            assert stuck.wait(10), "the thread reacted, since the loop sits here"
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert len(first.stuck) == 1 and first.lost == []
            assert str(first.stuck[0]).startswith("rank 1 has closed")

    run(scenario())


class Setting(list):
    """Sets an event with what is appended."""

    def __init__(self, event: threading.Event) -> None:
        super().__init__()
        self._event = event

    def append(self, error: RankError) -> None:
        """Keep it."""
        super().append(error)
        self._event.set()


def test_a_stranger_at_the_port_of_the_watch_is_nobody_s_death(run):
    """Connections that come and go, with and without ZMQ, while the ranks beat."""

    async def scenario():
        async with watched(2) as told:
            endpoint = told[1].watch._wire._socket.getsockopt_string(zmq.LAST_ENDPOINT)
            host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
            for _ in range(20):
                _, writer = await asyncio.open_connection(host, int(port))
                writer.close()
                await writer.wait_closed()
            with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
                socket.linger = 0
                socket.connect(endpoint)
                with contextlib.suppress(zmq.Again):  # refused before it could send
                    socket.send(b"\x97\x01\x63", zmq.DONTWAIT)
                sequence = told[0].watch._sequence
                await wait_until(lambda: told[0].watch._sequence > sequence + 5, "five beats")
            await wait_until(lambda: told[0].watch._sequence > sequence + 10, "ten beats")
            assert not any(one.lost for one in told)

    run(scenario())


@pytest.mark.parametrize("liar", [0, 1])
def test_a_message_of_another_version_is_an_error_and_no_silent_end(run, liar):
    """The thread that cannot go on says so."""

    async def scenario():
        async with watched(2) as told:
            tell = told[liar].watch._wire.tell
            told[liar].watch._wire.tell = lambda beat, rows: tell("nonsense", "nonsense")
            other = told[1 - liar]
            await wait_until(lambda: other.lost, "the error")
            assert f"rank {1 - liar} cannot watch the other ranks any more" in str(other.lost[0])

    run(scenario())


def test_a_beat_in_another_rank_s_name_is_refused(run):
    """Rank 2 says that it is rank 1."""

    async def scenario():
        async with watched(3) as told:
            wire = told[2].watch._wire
            wire.tell, tell = (lambda beat, rows: tell(told[1].progress.beat(1, 999), rows)), wire.tell
            await wait_until(lambda: told[0].lost, "the error")
            assert "says that it is of rank 1" in str(told[0].lost[0])

    run(scenario())


def test_a_watch_that_was_never_started_can_be_closed(run):
    """Nothing stays open."""

    async def scenario():
        with groups(2) as made:
            for told in [Told(group) for group in made]:
                await told.watch.aclose()
                told.watch.stop()

    run(scenario())


def test_stop_says_farewell_without_the_loop(run):
    """For a process that is about to leave: the other ranks hear why."""

    async def scenario():
        async with watched(2, timeout_s=30, beat_s=10) as (first, second):
            second.progress.error = "out of memory"
            second.watch.stop()
            await wait_until(lambda: first.lost, "the error")
            assert str(first.lost[0]) == "rank 1 failed: out of memory"
            assert not second.watch._thread.is_alive()

    run(scenario())


def test_H1_a_watch_uses_next_to_no_cpu(run):
    """Three ranks of this process together, at a beat of 1 s: some thread time, far from 1 % each."""

    async def scenario():
        async with watched(3, beat_s=0.05, timeout_s=30) as told:
            beats, cpu = told[0].watch._sequence, time.process_time()
            await wait_until_slowly(lambda: told[0].watch._sequence >= beats + 40)
            used = (time.process_time() - cpu) / 40
        assert used / 3 < 0.01, f"{used * 1e3:.2f} ms per beat of three ranks"

    run(scenario())


async def wait_until_slowly(condition) -> None:
    """Without much CPU of its own."""
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.05)
