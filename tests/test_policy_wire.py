"""Priority and deadline on their way from a client to the scheduler."""

from __future__ import annotations

from wire_fakes import FakeScheduler
from wire_support import run, wait_until

from aioprefill.wire.client import PairClient
from aioprefill.wire.messages import Submit, decode, encode

__all__ = ["run"]


def test_F2_priority_and_deadline_reach_the_scheduler(run):
    """As the client gave them; without, the defaults."""

    async def scenario():
        scheduler = FakeScheduler()
        async with scheduler.service() as service, PairClient(service.endpoint) as client:
            client.submit([1, 2], request_id="a", handoff=False, priority=-3, deadline_s=1.5)
            client.submit([1, 2], request_id="b", handoff=False)
            await wait_until(lambda: len(scheduler.requests) == 2, "the requests")
            got = {name: (item.priority, item.deadline_s) for name, item in scheduler.requests.items()}
            assert got == {"a": (-3, 1.5), "b": (0, None)}

    run(scenario())


def test_the_defaults_take_no_bytes() -> None:
    """A request without them is as it was."""
    plain, full = Submit("a", b"1234"), Submit("a", b"1234", priority=1, deadline_s=2.0)
    assert b"deadline" not in encode(plain) and decode(encode(full)) == full
