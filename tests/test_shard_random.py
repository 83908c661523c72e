"""Ranks of several servers that do anything in any order: no page is lost or written to by a stranger."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

from shard_support import PAGES, Bench

from aioprefill.wire.messages import Arrived, Refused, Reserved, unpack_ids

NAMES = ("a", "b", "c")


@dataclass(eq=False)
class Rank:
    """One rank's end of one hand-off."""

    server: Server
    rank: int
    ticket: int
    room: str
    need: int
    state: str = "new"
    """new, announced, reserved, written, done; or ended, failed (is yet to say that it is quiet)."""
    pages: list[int] = field(default_factory=list)
    """Those that it may still write to."""

    @property
    def sender(self) -> str:
        return f"{self.server.group}{self.rank}"

    @property
    def ended(self) -> bool:
        return self.state in ("done", "ended")


@dataclass(eq=False)
class Server:
    """A prefill server: each rank works off the same list of hand-offs, at its own pace."""

    group: str
    shards: int
    ranks: list[list[Rank]] = field(default_factory=list)
    connected: list[bool] = field(default_factory=list)
    opened: int = 0
    alive: bool = True


class World:
    """A book and its servers; `step` does one thing at random."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.hostility = self.random.choice((0.01, 0.05, 0.3))
        self.bench = Bench()
        self.book = self.bench.book
        self.book._moves._reply = self._reply
        self.counts: Counter[str] = Counter()
        self.owner: dict[tuple[str, int], Rank] = {}
        self.taken: set[tuple[str, int]] = set()
        """Hand-offs that the book took, each of which the worker must hear of once."""
        self.memory: dict[tuple[int, int], tuple[str, int]] = {}
        """Who wrote what is at a page's shard."""
        self.servers: list[Server] = []
        self._births = 0
        self._seen = 0
        for _ in range(2):
            self._start()

    def _start(self) -> None:
        shards = self.random.choice((1, 2, 2, 4))
        server = Server(f"s{self._births}.", shards)
        self._births += 1
        server.ranks = [[] for _ in range(shards)]
        server.connected = [True] * shards
        self.servers.append(server)

    def _reply(self, sender: str, message: Reserved | Refused | Arrived) -> None:
        end = self.owner[sender, message.ticket]
        if not end.server.connected[end.rank]:
            return
        match message:
            case Reserved():
                if end.state == "announced":
                    end.pages, end.state = unpack_ids(message.pages).tolist(), "reserved"
            case Refused():
                if not end.ended:
                    end.state = "failed"
                    self.counts["refused"] += 1
            case Arrived():
                assert end.state in ("written", "failed")
                end.state = "done" if end.state == "written" else "failed"

    def step(self) -> None:
        server = self.random.choice(self.servers)
        rank = self.random.randrange(server.shards)
        ends = server.ranks[rank]
        open_ends = [end for end in ends if not end.ended]
        match self.random.randrange(20):
            case 0 | 1 | 2 if server.alive:
                self._open(server)
            case 3 | 4 | 5 | 6 if server.alive:
                self._announce(server, rank)
            case 7 | 8 | 9 | 10 | 11 if open_ends and server.alive:
                self._go_on(self.random.choice(open_ends))
            case 12 if open_ends and server.alive and self._hostile():
                self._abandon(server, self.random.choice(open_ends).ticket)
            case 13 if server.alive and self._hostile():
                self._disconnect(server, rank)
            case 14 if not server.alive or self._hostile():
                self._die(server)
            case 15 if self._hostile():
                self.book.give_up(self.random.choice(NAMES), "given up", self.bench.now)
            case 16 if self._hostile():
                self.bench.now += 6.0
                self.book.expire(self.bench.now)
            case 17 | 18:
                self.bench.settle()
        self.check()

    def _hostile(self) -> bool:
        return self.random.random() < self.hostility

    def _open(self, server: Server) -> None:
        """One more hand-off for all ranks, which begin it when they get there."""
        if any(len([end for end in ends if not end.ended]) > 3 for ends in server.ranks):
            return
        room = self.random.choice(NAMES)
        server.opened += 1
        need = self.random.randint(1, 4)
        for rank, ends in enumerate(server.ranks):
            end = Rank(server, rank, server.opened, room, need)
            ends.append(end)
            self.owner[end.sender, end.ticket] = end

    def _announce(self, server: Server, rank: int) -> None:
        for end in server.ranks[rank]:
            if end.state == "new":
                break
        else:
            return
        before = [other for other in server.ranks[rank] if other.ticket < end.ticket]
        if any(other.room == end.room and not other.ended for other in before):
            return  # a host opens a room when its predecessor of that name is released
        if not server.connected[rank]:
            server.connected[rank] = True
        end.state = "announced"
        whole = {"shards": server.shards, "group": server.group, "pages": end.need}
        self.bench.announce(rank, end.room, end.ticket, **whole)

    def _go_on(self, end: Rank) -> None:
        where = {"room": end.room, "ticket": end.ticket, "group": end.server.group}
        if end.state == "reserved":
            if self.random.random() < 0.3:
                self._write(end)  # the notification comes later, or never
                return
            self._write(end)
            end.state = "written" if end.server.connected[end.rank] else "reserved"
            if end.state == "written":
                end.pages = []
                self.bench.finish(end.rank, token=end.ticket, **where)
        elif end.state == "failed" and end.server.connected[end.rank]:
            if end.pages and self.random.random() < 0.4:
                self.bench.cancel(end.rank, quiet=False, **where)
                self._write(end)  # a live write goes on
            else:
                end.state = "ended"
                self.bench.cancel(end.rank, **where)
        elif not end.server.connected[end.rank]:
            end.server.connected[end.rank] = True

    def _write(self, end: Rank) -> None:
        for page in end.pages:
            assert page not in self.bench.worker.free, "written to a page that is free"
            assert page in self.bench.worker.out.get(end.room, ()), "written to another room's page"
            self.memory[page, end.rank] = end.server.group, end.ticket

    def _abandon(self, server: Server, ticket: int) -> None:
        for ends in server.ranks:
            for end in ends:
                if end.ticket == ticket and not end.ended and self.random.random() < 0.7:
                    end.state = "ended" if end.state == "new" else "failed"

    def _disconnect(self, server: Server, rank: int) -> None:
        server.connected[rank] = False
        for end in server.ranks[rank]:
            if not end.ended and end.state != "new":
                end.state = "failed"
        self.book.sender_left(f"{server.group}{rank}", "left", self.bench.now)
        self.counts["left"] += 1

    def _die(self, server: Server) -> None:
        if server.alive:
            server.alive = False
            for rank in range(server.shards):
                self._disconnect(server, rank)
            self._start()
        else:
            rank = self.random.randrange(server.shards)
            for end in server.ranks[rank]:
                end.state, end.pages = "ended", []
            self.book.sender_dead(f"{server.group}{rank}", self.bench.now)

    def check(self) -> None:
        worker = self.bench.worker
        self.taken.update(room.origin for room in self.book._rooms.values())
        out = [page for pages in worker.out.values() for page in pages]
        assert sorted(out + worker.free) == list(range(PAGES)), "a page is lost or given twice"
        for entry in worker.heard[self._seen :]:
            self.counts[str(entry[0])] += 1
            if entry[0] == "arrived":
                _, room, pages, token, shards = entry
                wrote = {self.memory[page, rank] for page in pages for rank in range(shards)}
                assert len(wrote) == 1, f"room {room} mixes hand-offs {wrote}"
                ((group, ticket),) = wrote
                assert ticket == token
                self.counts[f"arrived {shards}"] += 1
                (server,) = [server for server in self.servers if server.group == group]
                for ends in server.ranks:
                    (end,) = [end for end in ends if end.ticket == ticket]
                    assert end.state in ("written", "done", "failed"), end
        self._seen = len(worker.heard)

    def end(self) -> None:
        """All servers give up what is left and say that they are quiet: everything must come back."""
        for server in self.servers:
            for rank, ends in enumerate(server.ranks):
                server.connected[rank] = True
                for end in ends:
                    if not end.ended:
                        unknown = end.state == "new"
                        end.state = "ended"
                        if not unknown:
                            where = {"room": end.room, "ticket": end.ticket, "group": server.group}
                            self.bench.cancel(rank, **where)
        for _ in range(3):
            self.bench.settle()
        for server in self.servers:
            for rank in range(server.shards):
                if not server.alive:
                    self.book.sender_dead(f"{server.group}{rank}", self.bench.now)
                for ends in server.ranks:
                    for end in ends:
                        if end.state == "reserved":  # a room that waited got its pages
                            self.bench.cancel(end.rank, end.room, end.ticket, group=server.group)
        self.bench.settle()
        assert len(self.book) == 0, f"left: {self.book._rooms}"
        self.check()
        assert len(self.taken) == self.counts["lost"] + self.counts["arrived"], "not heard of exactly once"
        self.bench.end()


def test_T3_whatever_the_ranks_of_servers_do_no_page_is_lost_or_written_by_a_stranger() -> None:
    """400 seeds of 800 steps, with servers of 1, 2 and 4 ranks; everything has happened often enough."""
    counts: Counter[str] = Counter()
    for seed in range(400):
        world = World(seed)
        try:
            for _ in range(800):
                world.step()
            world.end()
        except BaseException as err:
            err.add_note(f"seed {seed}")
            raise
        counts += world.counts
    for kind in ("arrived 1", "arrived 2", "arrived 4", "lost", "released", "refused", "left"):
        assert counts[kind] > 100, counts
