"""Section L of the behaviours, against the shared loop with the fake host under a virtual clock."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import uvloop

from aioprefill.config import SchedulerConfig
from aioprefill.errors import DeviceError, HostError
from aioprefill.host import Hold, Ingested
from aioprefill.scheduler import PrefillScheduler
from aioprefill.testing.clock import VirtualLoop, settle, virtual_time
from aioprefill.testing.host import FakeForward, FakeHost, FakePiece, FakeRequest


@asynccontextmanager
async def running(host: FakeHost, *, continuous: bool = True) -> AsyncIterator[PrefillScheduler]:
    """A scheduler on the fake host; on leaving, no request may be open."""
    config = SchedulerConfig(continuous_intake=continuous, drain_timeout_s=1.0)
    async with PrefillScheduler(host, config) as scheduler:
        await settle()
        yield scheduler
        while host.in_flight and scheduler.health().live:
            host.forwards[host.in_flight[0]].completion.complete()
            await settle()
    assert host.in_flight == []
    assert all(len(outcomes) == 1 for outcomes in host.outcomes.values())


def complete(host: FakeHost, number: int) -> None:
    """The device is done with a forward."""
    host.forwards[number].completion.complete()


@virtual_time
async def test_L1_a_second_forward_is_launched_while_the_first_is_pending_and_never_a_third() -> None:
    """Three requests, none complete: two launches."""
    host = FakeHost()
    async with running(host):
        for name in "abc":
            host.arrive(name)
        await settle()
        assert host.in_flight == [0, 1]
        complete(host, 0)
        await settle()
        assert host.in_flight == [1, 2]


@pytest.mark.parametrize(
    ("comes", "batches"),
    [
        ("request", ["a,b", "c,late"]),
        ("handshake", ["a,b", "c,early"]),
        ("in_place", ["a,b"]),
    ],
)
def test_L1_what_comes_during_a_launch_counts_for_the_forward_behind_it(
    comes: str, batches: list[str]
) -> None:
    """A launch takes its time: a request can join the second batch, a pause keeps it from being launched."""

    class SlowLaunch(FakeHost):
        """Something comes while the first launch is under way."""

        def launch(self, now: float, batch: list[FakePiece], number: int) -> FakeForward:
            if number == 0:
                if comes == "request":
                    self.arrive("late")
                elif comes == "handshake":
                    self.bootstrap("early")
                else:
                    self.control(comes)
            return super().launch(now, batch, number)

    async def main() -> None:
        host = SlowLaunch(batch_requests=2)
        async with running(host):
            host.arrive("early", bootstrapped=False)
            for name in "abc":
                host.arrive(name)
            await settle()
            prepared = [entry.removeprefix("prepare ") for entry in host.log if entry.startswith("prepare")]
            assert prepared == batches
            host.control("resume")

    virtual_time(main)()


@virtual_time
async def test_L2_results_are_processed_in_launch_order_once_even_when_the_second_is_ready_first() -> None:
    """The second completes first and waits for the first."""
    host = FakeHost()
    async with running(host):
        host.arrive("a")
        host.arrive("b")
        await settle()
        complete(host, 1)
        await settle()
        assert host.in_flight == [0, 1]
        complete(host, 0)
        await settle()
    assert [entry for entry in host.log if entry.startswith("result")] == ["result 0", "result 1"]


@virtual_time
async def test_L3_requests_received_with_both_slots_full_are_launched_after_the_oldest_result() -> None:
    """No further input arrives."""
    host = FakeHost()
    async with running(host):
        host.arrive("a")
        host.arrive("b")
        await settle()
        host.arrive("late")
        await settle()
        assert host.log[-1] == "ingest 1", "it was received while both slots were full"
        complete(host, 0)
        await settle()
        assert host.log[-3:] == ["bookkeep 1", "prepare late", "launch 2"]


@virtual_time
async def test_L4_an_empty_preparation_is_not_retried_on_polls() -> None:
    """Wakes that bring nothing, from every side, make no attempt."""
    host = FakeHost()
    async with running(host):
        host.arrive("a")
        await settle()
        calls = host.prepare_calls
        for _ in range(13):
            host.wake.input()
            host.wake.transfers()
            await settle()
        assert host.prepare_calls == calls


@pytest.mark.parametrize("change", ["request", "bootstrapped", "retired", "abort", "admission", "result"])
def test_L4_what_can_change_admission_retries_it_at_once(change: str) -> None:
    """Each of them makes exactly one more attempt right away, and its batch is launched if there is one."""

    async def main() -> None:
        host = FakeHost(slots=2)
        async with running(host):
            host.arrive("first")
            await settle()
            complete(host, 0)
            await settle()
            host.arrive("second")
            host.arrive("unready", bootstrapped=False)
            await settle()
            host.arrive("waits for a slot")
            await settle()
            launches, calls = len(host.forwards), host.prepare_calls
            assert host.in_flight == [1]
            {
                "request": lambda: host.arrive("another"),
                "bootstrapped": lambda: host.bootstrap("unready"),
                "retired": lambda: host.end_transfer("first"),
                "abort": lambda: host.abort("first"),
                "admission": lambda: host.wake.admission(),
                "result": lambda: complete(host, 1),
            }[change]()
            await settle()
            frees = change in ("retired", "abort")
            assert host.prepare_calls == calls + 1
            assert len(host.forwards) == launches + frees
            if change == "result":
                assert host.in_flight == []

    virtual_time(main)()


@virtual_time
async def test_L5_with_nothing_in_flight_every_step_prepares_and_no_marker_survives() -> None:
    """Each event makes an attempt; a marker from a pending result does not outlive it."""
    host = FakeHost(slots=1)
    async with running(host) as scheduler:
        host.arrive("a")
        await settle()
        host.arrive("b")
        await settle()
        assert scheduler._pipeline.marker
        complete(host, 0)
        await settle()
        assert not scheduler._pipeline.marker
        for _ in range(3):
            calls = host.prepare_calls
            host.wake.input()
            await settle()
            assert host.prepare_calls == calls + 1
        host.end_transfer("a")
        await settle()
        assert host.in_flight == [1]


@virtual_time
async def test_L6_chunk_bookkeeping_runs_once_per_batch_whatever_the_number_of_polls() -> None:
    """A long prompt in chunks, with polls in between."""
    host = FakeHost(chunk_tokens=100)
    async with running(host):
        host.arrive("long", tokens=350)
        for number in range(4):
            for _ in range(5):
                host.wake.input()
                host.wake.transfers()
                await settle()
            complete(host, number)
            await settle()
        assert [forward.bookkept for forward in host.forwards] == [1, 1, 1, 1]
        assert host.sends["long"] == [(0, 100), (100, 200), (200, 300), (300, 350)]


@virtual_time
async def test_L6_two_results_ready_together_still_have_the_full_step_between_them() -> None:
    """Result, input, bootstraps, bookkeeping, one preparation; KV ranges as one at a time."""
    host = FakeHost(chunk_tokens=100)
    async with running(host):
        host.arrive("long", tokens=400)
        host.arrive("unready", bootstrapped=False)
        await settle()
        assert host.in_flight == [0, 1]
        host.log.clear()
        complete(host, 0)
        complete(host, 1)
        # what no wake announces, the step finds all the same
        host._inbox.append(FakeRequest("late", 100))
        host._bootstrapped.append(host._requests["unready"])
        await settle()
        between = host.log[host.log.index("result 0") : host.log.index("result 1")]
        assert between[:4] == ["result 0", "ingest 1", "bootstrapped 1", "bookkeep 1"]
        assert between[4].startswith("prepare") and between[5] == "launch 2"


@virtual_time
async def test_L6_bookkeeping_goes_on_while_draining() -> None:
    """Nothing is launched any more, and the KV range of the second chunk is right all the same."""
    host = FakeHost(chunk_tokens=100)
    async with running(host) as scheduler:
        host.arrive("long", tokens=200)
        await settle()
        assert host.in_flight == [0, 1]
        drained = asyncio.ensure_future(scheduler.drain(5.0))
        await settle()
        complete(host, 0)
        complete(host, 1)
        await settle()
        assert host.sends["long"] == [(0, 100), (100, 200)]
        host.end_transfer("long")
        report = await drained
        assert report.finished == ("long",) and report.dropped == ()
        assert host.idle_calls == 1


@virtual_time
async def test_L8_a_delayed_sample_is_submitted_after_the_result_before_it_and_not_polled_earlier() -> None:
    """In the step of that result, in front of everything else."""
    host = FakeHost(delayed_sampling=True)
    async with running(host):
        host.arrive("a")
        host.arrive("b")
        await settle()
        assert not host.forwards[1].completion.submitted
        complete(host, 0)
        complete(host, 1)
        await settle()
        steps = [entry for entry in host.log if entry.startswith(("result", "sample"))]
        assert steps == ["result 0", "sample 1", "result 1"]
        assert host.log.index("sample 1") == host.log.index("result 0") + 1


@virtual_time
async def test_L8_polling_a_sample_that_was_never_submitted_raises() -> None:
    """A host that forgets it ends with an error and every request answered, not with a wait for ever."""
    host = FakeHost(delayed_sampling=True)
    host.sample_delayed = lambda: None  # type: ignore[method-assign]
    with pytest.raises(HostError, match="never submitted"):
        async with PrefillScheduler(host) as scheduler:
            host.arrive("a")
            host.arrive("b")
            await settle()
            complete(host, 0)
            await scheduler.wait_stopped()
    assert host.outcomes["b"] == ["host"]


@virtual_time
async def test_L11_an_unsupported_shape_warns_once_and_uses_the_hosts_own_loop(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The warning names the shape; not one host call is made."""
    for shape in ("attention data parallelism 2", "speculative decoding", "embedding models"):
        host = FakeHost()
        host.unsupported_shape = shape
        async with PrefillScheduler(host) as scheduler:
            await scheduler.wait_stopped()
        assert host.own_loops == 1 and host.prepare_calls == 0 and host.log == []
        warnings = [record.getMessage() for record in caplog.records if shape in record.getMessage()]
        assert len(warnings) == 1 and "own loop" in warnings[0]


@virtual_time
async def test_L9_a_transfer_that_ends_during_a_forward_is_retired_at_once_and_its_slot_admits() -> None:
    """Not at the end of the forward, 60 s later."""
    host = FakeHost(slots=2)
    async with running(host):
        loop = asyncio.get_running_loop()
        host.arrive("a")
        await settle()
        complete(host, 0)
        await settle()
        host.arrive("b")
        await settle()
        host.forwards[1].completion.complete(at=60.0)
        host.arrive("c")
        await settle()
        assert host.in_flight == [1]
        loop.call_at(1.0, host.end_transfer, "a")
        await asyncio.sleep(1.5)
        assert "retired a at 1.000" in host.log
        assert host.in_flight == [1, 2], "the slot that came back admitted c at once"


@virtual_time
async def test_L10_with_the_switch_off_a_result_is_waited_for_in_the_blocking_way() -> None:
    """The loop stands still meanwhile: input that came during the forward is taken after it."""
    host = FakeHost(duration_s=5.0)
    async with running(host, continuous=False):
        loop = asyncio.get_running_loop()
        host.arrive("a")
        loop.call_at(1.0, host.arrive, "b")
        taken: list[float] = []
        ingest = host.ingest

        def spy(now: float, *, hold: Hold) -> Ingested:
            result = ingest(now, hold=hold)
            if result.requests:
                taken.append(now)
            return result

        host.ingest = spy  # type: ignore[method-assign]
        await settle()
        assert loop.time() == 10.0, "blocked for the first forward, then for the second"
        assert taken == [0.0, 5.0]


@virtual_time
async def test_L10_both_modes_make_the_same_decisions() -> None:
    """The host's log is the same, request by request, for arrivals between forwards."""
    logs = []
    for continuous in (True, False):
        host = FakeHost(chunk_tokens=100, duration_s=1.0)
        async with running(host, continuous=continuous):
            host.arrive("a", tokens=250)
            host.arrive("b")
            await asyncio.sleep(20)
            for name in ("a", "b"):
                host.end_transfer(name)
            await settle()
        logs.append([entry for entry in host.log if not entry.startswith(("ingest", "retired"))])
    assert logs[0] == logs[1]


@virtual_time
async def test_L13_after_the_last_result_one_empty_step_runs_also_after_hours() -> None:
    """No batch is remembered as running, `on_idle` once per quiet time."""
    host = FakeHost()
    async with running(host):
        for round_number in range(2):
            host.arrive(f"r{round_number}")
            await settle()
            complete(host, round_number)
            await settle()
            assert host.last_batch is None
            assert host.idle_calls == round_number + 1
            host.wake.input()
            host.wake.transfers()
            await asyncio.sleep(3 * 3600)
            assert host.idle_calls == round_number + 1


@virtual_time
async def test_H1_an_idle_loop_makes_no_turn_and_takes_the_first_message_at_once() -> None:
    """An hour of quiet costs nothing; so does an hour of waiting for a forward."""
    host = FakeHost()
    async with running(host):
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        for pending in (False, True):
            if pending:
                host.arrive("long")
                await settle()
            before = loop.turns
            await asyncio.sleep(3600)
            assert loop.turns - before <= 3, "the timer of this test, and nothing else"
            taken = loop.time()
            host.arrive(f"first after the quiet {pending}")
            await settle()
            assert host.log[-1] != "idle" and loop.time() == taken
            assert len(host.forwards) == 1 + 2 * pending
            if not pending:
                complete(host, 0)
                await settle()


def test_H2_the_loop_leaves_the_processor_to_side_threads_while_it_waits() -> None:
    """Its thread uses at most 5 % of the time that it waits: at depth 1, at depth 2, and while paused."""

    async def main() -> None:
        host = FakeHost()
        async with running(host):
            loop = asyncio.get_running_loop()
            for depth in (1, 2, "paused"):
                host.control("in_place") if depth == "paused" else host.arrive(f"r{depth}")
                await settle()
                cpu, wall = time.thread_time(), time.perf_counter()
                passed = loop.create_future()
                loop.call_later(0.3, passed.set_result, None)
                await passed
                share = (time.thread_time() - cpu) / (time.perf_counter() - wall)
                assert share <= 0.05, f"{depth}: {share:.1%}"
            for number in (0, 1):
                complete(host, number)
            host.control("resume")
            await settle()

    uvloop.run(main())


@virtual_time
async def test_S3_a_device_error_fails_its_forward_and_a_sticky_one_stops_the_loop() -> None:
    """The error is raised from the scheduler's block; the host answers what is open."""
    host = FakeHost()
    with pytest.raises(DeviceError, match="cudaErrorIllegalAddress"):
        async with PrefillScheduler(host) as scheduler:
            host.arrive("a")
            await settle()
            host.forwards[0].completion.fail(DeviceError("cudaErrorLaunchOutOfResources", "x", sticky=False))
            await settle()
            assert host.outcomes["a"] == ["cudaErrorLaunchOutOfResources"]
            host.arrive("b")
            host.arrive("c")
            await settle()
            host.forwards[1].completion.fail(DeviceError("cudaErrorIllegalAddress", "x", sticky=True))
            await scheduler.wait_stopped()
            assert not scheduler.health().live
    assert host.outcomes["c"] == ["host"]
    assert isinstance(host.closed_with, HostError)


@virtual_time
async def test_S4_a_host_call_that_breaks_the_host_stops_the_loop_with_every_request_answered() -> None:
    """The cause is raised, not an exception group."""
    host = FakeHost()

    def broken(now: float, **options: object) -> None:
        raise ZeroDivisionError("broken host")

    with pytest.raises(ZeroDivisionError, match="broken host"):
        async with PrefillScheduler(host) as scheduler:
            await settle()
            host.prepare = broken  # type: ignore[method-assign,assignment]
            host.arrive("a")
            await scheduler.wait_stopped()
    assert host.outcomes["a"] == ["host"]


@virtual_time
async def test_H3_health_names_a_forward_past_its_stall_limit() -> None:
    """Ready before, unready after, live throughout."""
    host = FakeHost()
    async with running(host) as scheduler:
        host.arrive("a")
        await asyncio.sleep(100)
        assert scheduler.health().ready
        await asyncio.sleep(30)
        health = scheduler.health()
        assert health.live and not health.ready and "forward 0" in health.reason


@virtual_time
async def test_the_call_order_numbers_every_host_call() -> None:
    """Without gaps, with the clock reading that the host decided by."""
    host = FakeHost()
    async with running(host) as scheduler:
        host.arrive("a")
        await asyncio.sleep(2)
        host.arrive("b")
        await settle()
        log = list(scheduler._order.log)
    assert [token.number for token in log] == list(range(len(log)))
    assert {token.kind for token in log} >= {"ingest", "prepare", "launch", "collect_bootstrapped"}
    assert [token.now for token in log if token.kind == "launch"] == [0.0, 2.0]


@virtual_time
async def test_the_tasks_are_named_and_gone_at_the_end() -> None:
    """One task per duty, none left."""
    host = FakeHost()
    async with running(host):
        names = {task.get_name() for task in asyncio.all_tasks()}
        assert {f"aioprefill.{duty}_task" for duty in ("intake", "prepare", "result", "transfer")} <= names
    assert len(asyncio.all_tasks()) == 1
