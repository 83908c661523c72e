"""The thread that owns a NIXL agent, and what it does with the agent, on a stand-in for nixl."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
from nixl_fake import FakeNixl

from aioprefill.errors import ConfigError
from aioprefill.transfer.agent_events import (
    AgentStopped,
    Notified,
    ProbeFailed,
    RemoteAdded,
    RemoteFailed,
    RemotePool,
    WriteFinished,
    WriteOrder,
)
from aioprefill.transfer.nixl_agent import NixlAgent, load_nixl
from aioprefill.transfer.nixl_environment import prepare_environment
from aioprefill.transfer.nixl_owner import PROBE, NixlOwner
from aioprefill.transfer.pool_view import PoolView

POOL = PoolView(4096, 8, 512)
FAR = RemotePool("far", b"md far", PoolView(1 << 20, 6, 512))


def order(number: int, ticket: int = 1) -> WriteOrder:
    pages = np.array([1, 2], dtype=np.int32)
    return WriteOrder(ticket, number, pages, pages, b"n%d" % number)


def make(window: int = 2) -> tuple[NixlOwner, FakeNixl]:
    nixl = FakeNixl()
    owner = NixlOwner(nixl, "me", POOL, window=window)
    owner.add_remote(FAR)
    assert owner.take_events() == [RemoteAdded("far")]
    return owner, nixl


def run(owner: NixlOwner, now: float = 0.0) -> list[object]:
    owner.progress(now)
    return owner.take_events()


def test_the_pool_is_registered_and_described_page_by_page() -> None:
    """One region; one descriptor of (address, bytes, device) for each page."""
    owner, nixl = make()
    assert nixl.calls[1] == ("register", (4096, 4096, 0, ""), "DRAM") and owner.metadata == b"md"
    assert PoolView(4096, 3, 512, "VRAM", 2).descriptors().tolist() == [
        [4096, 512, 2], [4608, 512, 2], [5120, 512, 2]
    ]  # fmt: skip


def test_writes_are_posted_in_order_and_few_at_a_time() -> None:
    """The window bounds what is posted; the next goes out when one is done."""
    owner, nixl = make(window=2)
    for number in range(3):
        owner.write("far", order(number))
    assert owner.busy and run(owner) == [] and [h.facts for h in nixl.transfers] == [(b"n0",), (b"n1",)]
    nixl.transfers[1].state = "DONE"
    assert run(owner) == [WriteFinished(1, 1, None)] and nixl.transfers[1].released == 1
    assert len(nixl.transfers) == 3
    for handle in nixl.transfers:
        handle.state = "DONE"
    assert run(owner) == [WriteFinished(1, 0, None), WriteFinished(1, 2, None)] and not owner.busy


def test_a_write_may_be_done_when_it_is_posted() -> None:
    """`transfer` says DONE at once."""
    owner, nixl = make()
    nixl.post_state = "DONE"
    owner.write("far", order(0))
    assert run(owner) == [WriteFinished(1, 0, None)]


@pytest.mark.parametrize("call", ["make", "post"])
def test_an_exception_is_terminal_and_the_remote_is_loaded_anew_where_the_connection_broke(call: str) -> None:
    """The error's name and text are the reason; the handle is released; later writes still work."""
    owner, nixl = make()
    nixl.raising[call] = ValueError("bad pages")
    owner.write("far", order(0))
    assert run(owner) == [WriteFinished(1, 0, "ValueError: bad pages")]
    assert all(handle.released == 1 for handle in nixl.transfers)
    del nixl.raising[call]
    owner.write("far", order(1))
    nixl.post_state = "DONE"
    events = run(owner)
    assert WriteFinished(1, 1, None) in events
    assert (RemoteAdded("far") in events) is (call == "post")


def test_a_failed_write_lets_others_end_before_the_remote_is_loaded_anew() -> None:
    """Nothing is posted over a broken connection, and nothing live is cut."""
    owner, nixl = make()
    for number in range(3):
        owner.write("far", order(number))
    run(owner)
    nixl.transfers[0].state = ConnectionError("reset")
    assert run(owner) == [WriteFinished(1, 0, "ConnectionError: reset")]
    assert "remove" not in nixl.names and len(nixl.transfers) == 2
    nixl.transfers[1].state = "ERR"
    assert run(owner) == [WriteFinished(1, 1, "NIXL reported ERR"), RemoteAdded("far")]
    assert nixl.names.count("remove") == 1 and len(nixl.transfers) == 3


def test_a_remote_that_cannot_be_loaded_anew_fails_its_writes() -> None:
    """Its process died: what waited is answered, and the owner says so."""
    owner, nixl = make(window=1)
    owner.write("far", order(0))
    owner.write("far", order(1))
    run(owner)
    nixl.transfers[0].state = ConnectionError("reset")
    nixl.raising["add"] = RuntimeError("gone")
    first, second, failed = run(owner)
    assert first == WriteFinished(1, 0, "ConnectionError: reset")
    assert isinstance(second, WriteFinished) and "RuntimeError: gone" in second.error
    assert failed == RemoteFailed("far", "RuntimeError: gone")
    owner.write("far", order(2))
    assert owner.take_events() == [WriteFinished(1, 2, "the peer is gone")]


def test_writes_that_wait_can_be_dropped_and_live_ones_cannot() -> None:
    """Only the ticket's own; a live write goes on; unknown remotes have none."""
    owner, nixl = make(window=1)
    for number, ticket in enumerate((1, 1, 2)):
        owner.write("far", order(number, ticket))
    run(owner)
    owner.drop_unposted("far", 1)
    owner.drop_unposted("nobody", 1)
    assert owner.take_events() == [WriteFinished(1, 1, "dropped before it was started")]
    nixl.transfers[0].state = "DONE"
    assert run(owner) == [WriteFinished(1, 0, None)] and nixl.transfers[1].facts == (b"n2",)


def test_T3_a_removed_remote_is_forgotten_when_its_writes_are_terminal_or_at_its_time() -> None:
    """No new writes; live ones go on; at `remove_at` the process is known dead and they are given up."""
    for until, now in ((5.0, 1.0), (0.5, 1.0)):
        owner, nixl = make()
        owner.write("far", order(0))
        run(owner)
        owner.write("far", order(1))
        owner.remove_remote("far", until)
        assert owner.take_events() == [WriteFinished(1, 1, "the peer is gone")]
        owner.write("far", order(2))
        assert owner.take_events() == [WriteFinished(1, 2, "the peer is gone")] and owner.busy
        if until > now:
            assert run(owner, now) == []
            nixl.transfers[0].state = "DONE"
            assert run(owner, now) == [WriteFinished(1, 0, None)]
        else:
            assert run(owner, now) == [WriteFinished(1, 0, "the peer is gone")]
        assert nixl.names[-1] == "remove" and not owner.busy
    owner.remove_remote("nobody", 0.0)


def test_a_remote_with_two_users_stays_for_the_second_and_one_that_comes_back_is_loaded_anew() -> None:
    """Two addresses of one worker; and a return while the last writes are ending."""
    owner, nixl = make()
    owner.add_remote(FAR)
    assert owner.take_events() == [RemoteAdded("far")]
    owner.remove_remote("far", 0.0)
    assert run(owner, 1.0) == [] and "remove" not in nixl.names
    owner.write("far", order(0))
    run(owner)
    owner.remove_remote("far", 9.0)
    owner.add_remote(FAR)
    run(owner)
    nixl.transfers[0].state = "DONE"
    assert RemoteAdded("far") in run(owner, 10.0) and nixl.names.count("remove") == 1


def test_notifications_are_reported_and_probes_are_not() -> None:
    """What other agents' writes say, with the agent's name."""
    owner, nixl = make()
    nixl.notifications = {"a": [b"1", PROBE, b"2"], "b": [b"3"]}
    assert run(owner) == [Notified("a", b"1"), Notified("a", b"2"), Notified("b", b"3")]


def test_a_probe_fails_only_for_a_process_that_is_gone() -> None:
    """Added once, notified each time; any exception says that nobody has the agent."""
    owner, nixl = make()
    owner.probe("writer", b"md writer")
    owner.probe("writer", b"md writer")
    assert owner.take_events() == [] and nixl.calls.count(("add", b"md writer")) == 1
    nixl.raising["notify"] = ConnectionError("reset")
    owner.probe("writer", b"md writer")
    assert owner.take_events() == [ProbeFailed("writer", "ConnectionError: reset")]
    assert nixl.calls[-1] == ("remove", "writer")
    nixl.raising["add"] = ConnectionError("refused")
    owner.probe("writer", b"md writer")
    assert owner.take_events() == [ProbeFailed("writer", "ConnectionError: refused")]
    owner.end_probe("writer")


def test_close_ends_everything_and_a_closed_owner_still_answers() -> None:
    """Live and waiting writes are answered, handles released, memory deregistered, the agent dropped."""
    owner, nixl = make(window=1)
    owner.write("far", order(0))
    owner.write("far", order(1))
    run(owner)
    owner.probe("writer", b"md")
    owner.close()
    assert owner.take_events() == [
        WriteFinished(1, 0, "the agent was closed"), WriteFinished(1, 1, "the agent was closed")
    ]  # fmt: skip
    assert nixl.transfers[0].released == 1 and nixl.names[-3:] == ["remove", "remove", "deregister"]
    owner.write("far", order(2))
    owner.add_remote(FAR)
    kinds = [type(event) for event in owner.take_events()]
    assert kinds == [WriteFinished, RemoteFailed]


# --- the thread ----------------------------------------------------------------------------------------


class Listener:
    """An agent on a fake nixl, and the events that reached the loop."""

    def __init__(self) -> None:
        self.nixl = FakeNixl()
        self.events: list[object] = []
        self.agent = NixlAgent("me", POOL, library=self.nixl)
        self.loop_thread = threading.get_ident()

    def start(self) -> None:
        self.agent.start(self._collect)

    def _collect(self, events: object) -> None:
        assert threading.get_ident() == self.loop_thread
        self.events += events

    async def posted(self) -> None:
        """Wait until a write was posted."""
        deadline = time.monotonic() + 5
        while not self.nixl.transfers:
            assert time.monotonic() < deadline, "nothing is posted"
            await asyncio.sleep(0.001)

    async def until(self, event: object) -> None:
        """Wait for an event."""
        deadline = time.monotonic() + 5
        while event not in self.events:
            assert time.monotonic() < deadline, f"no {event}: {self.events}"
            await asyncio.sleep(0.001)


@pytest.mark.asyncio
async def test_one_thread_does_everything_and_ends_with_close() -> None:
    """Commands and events cross between loop and owner; close answers what is live and ends the thread."""
    listener = Listener()
    listener.start()
    agent = listener.agent
    assert agent.metadata == b"md"
    agent.add_remote(FAR)
    agent.write("far", order(0))
    agent.expect(True)
    agent.expect(True)
    await listener.until(RemoteAdded("far"))
    await listener.posted()
    listener.nixl.transfers[0].state = "DONE"
    await listener.until(WriteFinished(1, 0, None))
    agent.write("far", order(1))
    agent.drop_unposted("far", 9)
    agent.probe("writer", b"md")
    agent.end_probe("writer")
    agent.remove_remote("far", grace_s=100.0)
    await agent.aclose()
    await agent.aclose()
    assert listener.events[-1] in (WriteFinished(1, 1, "the agent was closed"),
                                   WriteFinished(1, 1, "the peer is gone"))  # fmt: skip
    assert "nixl me" not in [thread.name for thread in threading.enumerate()]
    agent.write("far", order(2))  # after the end: answered all the same
    await listener.until(WriteFinished(1, 2, "the peer is gone"))


@pytest.mark.asyncio
async def test_a_write_that_is_ordered_while_the_agent_closes_is_answered() -> None:
    """It stands in the queue behind the close, and no thread is left to take it."""
    listener = Listener()
    listener.start()
    closing = asyncio.ensure_future(listener.agent.aclose())
    await asyncio.sleep(0)
    listener.agent.write("far", order(0))
    await closing
    await listener.until(WriteFinished(1, 0, "the peer is gone"))


@pytest.mark.asyncio
async def test_an_error_of_the_agent_stops_it_and_everything_is_answered() -> None:
    """AgentStopped with the error, then the end of every write, also of those ordered later."""
    listener = Listener()
    listener.start()
    listener.agent.add_remote(FAR)
    listener.agent.write("far", order(0))
    await listener.until(RemoteAdded("far"))
    listener.nixl.raising["notifs"] = RuntimeError("lost its mind")
    await listener.until(AgentStopped("RuntimeError: lost its mind"))
    listener.agent.write("far", order(1))
    await listener.until(WriteFinished(1, 0, "the agent was closed"))
    await listener.until(WriteFinished(1, 1, "the peer is gone"))
    await listener.agent.aclose()


@pytest.mark.asyncio
async def test_an_agent_that_cannot_be_made_is_a_config_error_and_closes_clean() -> None:
    """The message says what failed and what to check; prepare raises it again."""
    listener = Listener()
    listener.nixl.raising["create"] = RuntimeError("no such device")
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"no such device.*UCX_NET_DEVICES"):
            listener.agent.prepare()
    await listener.agent.aclose()
    unused = NixlAgent("unused", POOL, library=FakeNixl())
    await unused.aclose()


def test_close_without_a_loop_ends_the_thread() -> None:
    """For callers that only prepared."""
    agent = NixlAgent("me", POOL, library=FakeNixl())
    agent.prepare()
    agent.close()
    assert "nixl me" not in [thread.name for thread in threading.enumerate()]


def test_a_loop_that_is_gone_does_not_hurt_the_owner() -> None:
    """The loop ended without closing the agent: events go nowhere, close still works."""
    listener = Listener()

    async def use() -> None:
        listener.start()
        listener.agent.add_remote(FAR)

    asyncio.run(use())
    listener.agent.close()
    assert "nixl me" not in [thread.name for thread in threading.enumerate()]


def test_missing_nixl_is_a_config_error_that_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package name and the pip command are in the message."""
    monkeypatch.setitem(sys.modules, "nixl", None)
    with pytest.raises(ConfigError, match="pip install --no-deps nixl nixl-cu13"):
        load_nixl()


def test_a_vram_pool_gets_its_device_on_the_owner_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """NIXL needs the device's context in the thread that uses it."""
    chosen: list[tuple[int, str]] = []
    runtime = SimpleNamespace(
        cudaSetDevice=lambda device: chosen.append((device, threading.current_thread().name))
    )
    monkeypatch.setattr("aioprefill.transfer.nixl_agent.cuda_runtime", lambda: runtime)
    agent = NixlAgent("gpu", PoolView(4096, 1, 512, "VRAM", 3), library=FakeNixl())
    agent.prepare()
    agent.close()
    assert chosen == [(3, "nixl gpu")]


def test_the_environment_is_filled_in_and_the_users_settings_are_kept() -> None:
    """Loopback tcp by default; the user's values win; RDMA keeps its modules; VRAM gets CUDA transports."""
    environ: dict[str, str] = {}
    assert prepare_environment(environ=environ) == environ == {
        "UCX_TLS": "tcp,self", "UCX_NET_DEVICES": "lo", "UCX_MODULES": "^ib",
        "NIXL_LOG_LEVEL": "FATAL", "UCX_LOG_LEVEL": "fatal",
    }  # fmt: skip
    environ = {"UCX_NET_DEVICES": "eth0", "NIXL_LOG_LEVEL": "INFO"}
    prepare_environment(environ=environ)
    assert environ["UCX_NET_DEVICES"] == "eth0" and environ["NIXL_LOG_LEVEL"] == "INFO"
    for rdma in ({"UCX_TLS": "rc_mlx5,cuda_copy"}, {"UCX_TLS": "all"}):
        prepare_environment(environ=rdma)
        assert "UCX_MODULES" not in rdma and "UCX_NET_DEVICES" not in rdma
    assert prepare_environment(memory="VRAM", environ={})["UCX_TLS"] == "tcp,self,cuda_copy,cuda_ipc"
    assert prepare_environment(interface="eth1", transports="tcp", environ={})["UCX_NET_DEVICES"] == "eth1"
    with pytest.raises(ConfigError, match="interface"):
        prepare_environment(interface=" ", environ={})
