"""The prefill side's view of a decode peer: greeting, fitting, silence, restarts. No sockets."""

from __future__ import annotations

import pytest

from aioprefill.errors import ConfigError
from aioprefill.kv_layout import KVLayout
from aioprefill.transfer.peer_session import (
    AddRemote,
    Lost,
    PeerSession,
    Ready,
    RemoveRemote,
    Say,
    SessionState,
)
from aioprefill.transfer.pool_info import check_fits, pool_info
from aioprefill.transfer.pool_view import PoolView
from aioprefill.wire.messages import Failed, Hello, Ping, Pong, PoolInfo, Token, Welcome

LAYOUT = KVLayout("w", layers=1, kv_heads=1, head_dim=1, page_size=16, dtype="float32")
S = SessionState
HELLO = Say(Hello("prefill", "ours"))


def info(agent: str = "d1", layout: KVLayout = LAYOUT) -> PoolInfo:
    return pool_info(agent, b"md", PoolView(4096, 10, layout.page_bytes), layout)


def welcome(epoch: str = "e1", **fields: object) -> Welcome:
    return Welcome(**{"role": "decode", "epoch": epoch, "model": "m", "fingerprint": "w", "vocab_size": 9,
                      "context_length": 9, "eos_token_ids": (), **fields})  # fmt: skip


def make() -> PeerSession:
    return PeerSession("tcp://p:1", LAYOUT, "ours", 0.0, lease_s=10.0)


def ready(session: PeerSession, agent: str = "d1", epoch: str = "e1", now: float = 0.0) -> None:
    session.connected(now)
    session.message(welcome(epoch), now)
    session.message(info(agent), now)
    session.remote_added()
    assert session.state is S.READY


def test_a_peer_is_greeted_checked_added_and_ready() -> None:
    """Hello, Welcome, PoolInfo, our agent: then rooms may be announced."""
    session = make()
    assert session.connected(0.0) == [HELLO]
    assert session.message(welcome(), 0.0) == []
    (added,) = session.message(info(), 0.0)
    assert isinstance(added, AddRemote) and added.remote.name == "d1" and added.remote.pool.num_pages == 10
    assert session.state is S.ADDING and not session.can_cancel
    assert session.remote_added() == [Ready(returned=False)]
    assert session.can_cancel and session.pool_pages == 10 and "ready" in repr(session)
    assert session.message(info(), 0.0) == []  # said again: nothing to do
    assert session.message(Token("r", 0, 1), 0.0) == []


@pytest.mark.parametrize(
    ("message", "why"),
    [
        (welcome(version=99), "speaks version 99"),
        (welcome(role="prefill"), "is a prefill server"),
        (info(layout=KVLayout("v", 1, 1, 1, 16, "float32")), "fingerprint is 'v', expected 'w'"),
        (info(layout=KVLayout("w", 1, 1, 1, 32, "float32")), "page_size is 32, expected 16"),
        (Failed("wire", "no more clients"), "no more clients"),
    ],
)
def test_a_peer_that_does_not_fit_is_rejected_and_asked_again_after_a_lease(
    message: object, why: str
) -> None:
    """All rooms fail with the difference; the rejection may pass, so a new Hello follows."""
    session = make()
    session.connected(0.0)
    (lost,) = session.message(message, 1.0)
    assert isinstance(lost, Lost) and why in lost.reason and lost.unannounced_too
    assert session.rejection is not None and why in session.rejection
    assert session.message(info(), 2.0) == []
    assert [type(command.message) for command in session.tick(5.0, waiting=False)] == [Ping]
    assert session.tick(12.0, waiting=False) == [HELLO] and session.rejection is None


def test_page_bytes_that_contradict_the_layout_do_not_fit() -> None:
    """On the wire and in our own pool."""
    session = make()
    session.connected(0.0)
    wrong = PoolInfo(**{name: getattr(info(), name) for name in info().__struct_fields__} | {"page_bytes": 1})
    (lost,) = session.message(wrong, 0.0)
    assert "page_bytes is 1, expected 128" in lost.reason
    with pytest.raises(ConfigError, match="pages of 5 bytes"):
        check_fits(PoolView(0, 1, 5), LAYOUT)


def test_T2_a_closed_connection_fails_announced_rooms_and_the_same_process_may_return() -> None:
    """Closed: rooms that it knows fail. The same agent answering again is ready without being added."""
    session = make()
    ready(session)
    (lost,) = session.disconnected()
    assert not lost.unannounced_too and "connection was closed" in lost.reason
    assert session.disconnected() == [] and not session.can_cancel
    assert session.tick(3.0, waiting=False) == []
    session.connected(3.0)
    session.message(welcome(), 3.0)
    assert session.message(info(), 3.0) == [Ready(returned=True)]


def test_T2_another_process_at_the_address_replaces_the_agent_after_a_grace() -> None:
    """The old agent's writes get a lease to become terminal."""
    session = make()
    ready(session)
    session.disconnected()
    session.connected(3.0)
    session.message(welcome("e2"), 3.0)
    commands = session.message(info("d2"), 3.0)
    assert commands[0] == RemoveRemote("d1", 10.0) and isinstance(commands[1], AddRemote)
    assert session.agent == "d2"


def test_T2_silence_past_the_lease_fails_all_rooms_and_a_sign_of_life_greets_again() -> None:
    """A stopped peer breaks no connection; its agent is kept; when it is back it is greeted anew."""
    session = make()
    ready(session)
    for now in range(1, 11):
        assert all(isinstance(command, Say) for command in session.tick(float(now), waiting=True))
    (lost, ping) = session.tick(11.0, waiting=True)
    assert isinstance(lost, Lost) and lost.unannounced_too and "silent for 10 s" in lost.reason
    assert isinstance(ping.message, Ping) and session.state is S.SILENT and session.agent == "d1"
    assert session.can_cancel
    assert session.message(Pong("e1"), 12.0) == [HELLO] and session.state is S.GREETING
    session.message(welcome(), 12.0)
    assert session.message(info(), 12.0) == [Ready(returned=True)]


def test_silence_counts_only_while_a_room_waits_and_while_we_are_awake_ourselves() -> None:
    """An idle peer is not failed; nor one whose messages we could not read because we were stopped."""
    session = make()
    ready(session)
    for now in range(1, 30):
        session.tick(float(now), waiting=False)
    assert all(isinstance(command, Say) for command in session.tick(31.0, waiting=True))
    session = make()
    ready(session)
    session.tick(1.0, waiting=True)
    assert all(isinstance(command, Say) for command in session.tick(60.0, waiting=True))


def test_an_address_that_nobody_serves_fails_by_the_lease_with_the_last_problem() -> None:
    """The handshake's problem is in the reason."""
    session = make()
    session.refused("not authorised")
    commands = [command for now in range(1, 12) for command in session.tick(float(now), waiting=True)]
    (lost,) = commands
    assert "no connection within 10 s (not authorised)" in lost.reason and lost.unannounced_too
    assert session.state is S.UNCONNECTED


def test_a_server_that_forgot_us_or_was_replaced_is_greeted_again() -> None:
    """hello_required, and a Pong of another epoch: announced rooms fail, Hello follows."""
    for message in (Failed("hello_required", "who?"), Pong("e2")):
        session = make()
        ready(session)
        lost, hello = session.message(message, 5.0)
        assert isinstance(lost, Lost) and not lost.unannounced_too and hello == HELLO
        assert session.message(Failed("hello_required", "who?"), 5.0) == []  # our Hello is under way
    assert session.message(Ping("e1"), 5.0) == [Say(Pong("ours"))]
    assert session.message(Failed("wire", "whatever"), 5.0)[0].unannounced_too


def test_errors_that_concern_no_greeting_are_ignored() -> None:
    """Failed for some message while ready; hello_required while unconnected."""
    session = make()
    assert session.message(Failed("hello_required", "x"), 0.0) == []
    ready(session)
    assert session.message(Failed("wire", "x"), 0.0) == []
    assert session.state is S.READY


def test_an_agent_that_cannot_be_used_rejects_the_peer() -> None:
    """Ours failed to add it, or lost it; while unconnected there is nobody to reject."""
    session = make()
    ready(session)
    (lost,) = session.remote_failed("NIXL_ERR_BACKEND", 1.0)
    assert "its NIXL agent cannot be used: NIXL_ERR_BACKEND" in lost.reason and session.agent is None
    session.disconnected()
    assert session.remote_failed("x", 2.0) == []
    assert session.remote_added() == []


def test_an_agent_that_is_added_after_the_connection_broke_is_known_on_return() -> None:
    """The answer of our own agent may come late."""
    session = make()
    session.connected(0.0)
    session.message(info(), 0.0)
    session.disconnected()
    assert session.remote_added() == []
    session.connected(1.0)
    assert session.message(info(), 1.0) == [Ready(returned=True)]
