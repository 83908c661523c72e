"""Runs SGLang's own loops and the plugin's on one script, and compares what came of them.

A script is a list of messages with the moment at which the receiver shows each. Forwards are computed at
their launch, for the model runs on the scheduler's thread; what a loop waits for is `copy_done`, which a
timer sets after the script's delay.
"""

from __future__ import annotations

import gc
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from copies import Copies
from fake_transfer import BOOK, Peer, Send
from messages import Act

SPIED = (
    "_copy_result_to_cpu",
    "get_next_disagg_prefill_batch_to_run",
    "on_idle",
    "process_batch_result",
    "process_prefill_chunk",
    "run_batch",
)
"""Methods of the scheduler that a run looks at."""
DEADLINE_S = 30.0
"""A run that takes longer hangs."""

Moment = Callable[["Run"], bool]


def start(_: Run) -> bool:
    """From the start."""
    return True


def results(count: int) -> Moment:
    """Once so many results were processed, or nothing is left to do: the same point in every loop."""

    def due(run: Run) -> bool:
        return run.results >= count

    due.by_count = True  # type: ignore[attr-defined]
    return due


def launches(count: int) -> Moment:
    """Once so many forwards were launched."""
    return lambda run: run.launches >= count


def answered(rid: str) -> Moment:
    """Once the client of a request was told."""
    return lambda run: rid in run.outcomes


def seconds(value: float) -> Moment:
    """Some time after the start."""

    def due(run: Run) -> bool:
        return time.monotonic() - run.started >= value

    due.at = value  # type: ignore[attr-defined]
    return due


def behind(moment: Moment, delay_s: float) -> Moment:
    """Some time after another moment was first seen."""
    seen: list[float] = []

    def due(run: Run) -> bool:
        if not seen and moment(run):
            seen.append(time.monotonic())
        return bool(seen) and time.monotonic() - seen[0] >= delay_s

    return due


def looks(moment: Moment, count: int) -> Moment:
    """At the receive of that number, counted from the first one that sees another moment."""
    seen: set[int] = set()

    def due(run: Run) -> bool:
        if moment(run):
            seen.add(run.calls)
        return len(seen) >= count

    return due


@dataclass
class Arrival:
    """One message and when it is shown."""

    message: Any
    when: Moment = start


@dataclass(frozen=True)
class Outcome:
    """What the client of one request was told."""

    tokens: tuple[int, ...]
    finish: str
    message: str = ""


@dataclass
class Run:
    """What one loop made of a script."""

    loop: str
    started: float = 0.0
    launches: int = 0
    results: int = 0
    in_flight: int = 0
    most_in_flight: int = 0
    outcomes: dict[str, list[Outcome]] = field(default_factory=dict)
    sends: dict[str, list[Send]] = field(default_factory=dict)
    send_order: list[str] = field(default_factory=list)
    batches: list[list[tuple[str, int, int]]] = field(default_factory=list)
    """(request, first token, end) of each launched batch."""
    seen_at: dict[str, float] = field(default_factory=dict)
    """When a message was handed to the scheduler, by request id."""
    answered_at: dict[str, float] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)
    """"launch n", "result n", "retired r": what happened, in order."""
    controls: list[Any] = field(default_factory=list)
    """Answers to control requests and health probes."""
    paused_launches: int = 0
    state: dict[str, Any] = field(default_factory=dict)
    calls: int = 0
    """Of the receiver."""
    preparations: list[bool] = field(default_factory=list)
    """Each look for a batch: whether storage retries were to advance."""
    chunk_steps: int = 0
    idle_calls: int = 0
    preparations_at_result: list[int] = field(default_factory=list)
    """How many looks for a batch there had been at each result."""
    delayed_samples: int = 0
    health_at: list[float] = field(default_factory=list)
    sent_at: dict[str, float] = field(default_factory=dict)
    """When the last chunk of a request was sent."""
    stats: Any = None
    """The plugin's own statistics."""
    error: BaseException | None = None

    def tokens(self) -> dict[str, list[tuple[tuple[int, ...], str]]]:
        """Tokens and finish reason by request."""
        return {
            rid: [(o.tokens, o.finish) for o in outcomes] for rid, outcomes in sorted(self.outcomes.items())
        }


class ScriptedReceiver:
    """Shows messages at their moments, and a `ShutdownReq` when every request has its outcome."""

    def __init__(self, bench: Bench, run: Run, arrivals: Iterable[Arrival], until: Moment | None) -> None:
        self._bench = bench
        self._run = run
        self._left = deque(arrivals)
        self._until = until
        self._wanted = {
            a.message.rid
            for a in self._left
            if type(a.message).__name__ == "TokenizedGenerateReqInput"
            and not a.message.rid.startswith("HEALTH_CHECK")
        }
        self._ended = False

    def recv_requests(self, local_reqs: Sequence[Any] | None = None) -> list[Any]:
        """See SGLang's receiver. Messages keep their order."""
        run = self._run
        run.calls += 1
        if time.monotonic() - run.started > DEADLINE_S:
            raise TimeoutError(f"{run.loop} hangs: {run}; waiting for {self._wanted - run.outcomes.keys()}")
        shown: list[Any] = []
        while self._left and (self._left[0].when(run) or (not shown and self._stuck())):
            message = self._left.popleft().message
            if isinstance(message, Act):
                message.do()
                continue
            shown.append(message)
            if getattr(message, "rid", None):
                run.seen_at.setdefault(message.rid, time.monotonic())
        if not shown and not self._left and not self._ended and self._over():
            from sglang.srt.managers.io_struct import ShutdownReq

            self._ended = True
            shown.append(ShutdownReq())
        return [*shown, *(local_reqs or ())]

    def _stuck(self) -> bool:
        """What was shown is done with, so the moment of the next message would never come."""
        shown = {rid for rid in self._run.seen_at if rid in self._wanted}
        done = shown <= self._run.outcomes.keys() and self._bench.quiet()
        return done and getattr(self._left[0].when, "by_count", False)

    def _over(self) -> bool:
        if self._until is not None:
            return self._until(self._run)
        return self._wanted <= self._run.outcomes.keys() and self._bench.quiet()


class SocketReceiver:
    """SGLang's own receiver on its own sockets, with what it receives written down."""

    def __init__(self, receiver: Any, run: Run) -> None:
        self._receiver = receiver
        self._run = run
        self.recv_from_tokenizer = receiver.recv_from_tokenizer
        self.recv_from_rpc = receiver.recv_from_rpc

    def recv_requests(self, local_reqs: Sequence[Any] | None = None) -> list[Any]:
        """See SGLang's receiver."""
        self._run.calls += 1
        received: list[Any] = self._receiver.recv_requests(local_reqs=local_reqs)
        for message in received:
            if getattr(message, "rid", None):
                self._run.seen_at.setdefault(message.rid, time.monotonic())
        return received


class Recorder:
    """Takes the place of the output streamer and of the sender to the tokenizer."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def stream_output(self, reqs: Sequence[Any], return_logprob: bool, skip_req: Any = None) -> None:
        """Write outcomes down."""
        for req in reqs:
            reason = req.finished_reason
            name = type(reason).__name__
            outcome = Outcome(tuple(req.output_ids), name, str(getattr(reason, "message", "")))
            self._run.outcomes.setdefault(req.rid, []).append(outcome)
            self._run.answered_at.setdefault(req.rid, time.monotonic())
            self._run.order.append(f"answer {req.rid}")

    def send_abort_output(self, abort_req: Any, req: Any) -> None:
        """Write down what SGLang aborts beside its output stream."""
        self._run.outcomes.setdefault(req.rid, []).append(Outcome((), "FINISH_ABORT", "aborted"))
        self._run.answered_at.setdefault(req.rid, time.monotonic())
        self._run.order.append(f"answer {req.rid}")

    def send_control_output(self, output: Any, recv_req: Any) -> None:
        """Write answers of control requests down."""
        self._run.controls.append(output)

    def send_output(self, output: Any, recv_obj: Any = None) -> None:
        """Write down what goes to the tokenizer."""
        self._run.controls.append(output)
        if type(output).__name__ == "HealthCheckOutput":
            self._run.order.append("health")
            self._run.health_at.append(time.monotonic())


class Bench:
    """One Scheduler on which loops run one after the other; each begins and must end clean."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        self.copies: Copies | None = None
        self._originals = {
            name: getattr(scheduler, name) for name in ("request_receiver", "output_streamer", *SPIED)
        }
        self._channels = scheduler.ipc_channels
        gc.collect()
        gc.freeze()  # SGLang collects garbage whenever its cache is flushed, which is between any two runs

    @property
    def receiver(self) -> Any:
        """The scheduler's own one."""
        return self._originals["request_receiver"]

    def quiet(self) -> bool:
        """Nothing is under way."""
        return bool(self.scheduler.is_fully_idle())

    def run(
        self,
        loop: str,
        arrivals: Iterable[Arrival] = (),
        *,
        receiver: Any = None,
        delay_s: Callable[[int], float | None] | float | None = 0.004,
        peers: dict[str, Peer] | None = None,
        until: Moment | None = None,
        prepare: Callable[[Run], None] = lambda _: None,
        clean: bool = True,
    ) -> Run:
        """Run `loop` ("blocking", "polling" or "plugin") on the script.

        With a `receiver` of SGLang's kind that one is used, and there is no script. `until` shuts the loop
        down at that moment instead of when every request has its outcome.
        """
        scheduler, run = self.scheduler, Run(loop)
        before = _resources(scheduler)
        arrivals = list(arrivals)
        BOOK.clear()
        rooms = self._rooms(arrivals, peers or {})
        self.copies = Copies(delay_s if callable(delay_s) else lambda _: delay_s)
        own = None if receiver is None else SocketReceiver(receiver, run)
        self._attach(run, own or ScriptedReceiver(self, run, arrivals, until))
        prepare(run)
        run.started = time.monotonic()
        try:
            _enter(scheduler, loop, run)
        except BaseException as error:
            run.error = error
            raise
        finally:
            self.copies.stop()
            for room, rid in rooms.items():
                if room in BOOK.sends:
                    run.sends[rid] = list(BOOK.sends[room])
            run.sent_at = {rooms[room]: at for room, at in BOOK.sent_at.items() if room in rooms}
            run.send_order = [rooms[room] for room in BOOK.order if room in rooms]
            run.state = _resources(scheduler)
            self._detach()
        if clean:
            assert run.state == before, f"{loop} left something behind: {run.state} != {before}"
        return run

    def _rooms(self, arrivals: Iterable[Arrival], peers: dict[str, Peer]) -> dict[int, str]:
        rooms: dict[int, str] = {}
        for arrival in arrivals:
            message = arrival.message
            if getattr(message, "bootstrap_room", None) is not None:
                rooms[message.bootstrap_room] = message.rid
                BOOK.peers[message.bootstrap_room] = peers.get(message.rid, Peer())
        return rooms

    def _attach(self, run: Run, receiver: Any) -> None:
        scheduler, recorder, originals = self.scheduler, Recorder(run), self._originals

        def run_batch(batch: Any) -> Any:
            run.order.append(f"launch {run.launches}")
            run.launches += 1
            run.in_flight += 1
            run.most_in_flight = max(run.most_in_flight, run.in_flight)
            run.paused_launches += bool(scheduler._engine_paused)
            run.batches.append([(req.rid, req.prefix_len, req.extend_end) for req in batch.reqs])
            return originals["run_batch"](batch)

        def process_batch_result(batch: Any, result: Any) -> None:
            run.preparations_at_result.append(len(run.preparations))
            originals["process_batch_result"](batch, result)
            run.order.append(f"result {run.results}")
            run.results += 1
            run.in_flight -= 1

        def copy_result(result: Any, batch: Any) -> None:
            originals["_copy_result_to_cpu"](result, batch)
            if result.delay_sample_func is not None and run.launches > 1:
                run.delayed_samples += 1
                run.order.append(f"sample {run.launches - 1}")
            assert self.copies is not None
            result.copy_done = self.copies.begin()

        def prepare(**arguments: Any) -> Any:
            run.preparations.append(arguments.get("should_retry_storage_prefetch", True))
            return originals["get_next_disagg_prefill_batch_to_run"](**arguments)

        def chunk_step(**arguments: Any) -> None:
            run.chunk_steps += arguments["last_batch"] is not None
            originals["process_prefill_chunk"](**arguments)

        def on_idle() -> None:
            run.idle_calls += 1
            originals["on_idle"]()

        scheduler.get_next_disagg_prefill_batch_to_run = prepare
        scheduler.process_prefill_chunk = chunk_step
        scheduler.on_idle = on_idle
        scheduler.run_batch = run_batch
        scheduler.process_batch_result = process_batch_result
        scheduler._copy_result_to_cpu = copy_result
        scheduler.request_receiver = receiver
        scheduler.output_streamer = recorder
        scheduler.send_abort_output = recorder.send_abort_output
        scheduler.send_control_output = recorder.send_control_output
        scheduler.ipc_channels = _Channels(self._channels, recorder)
        scheduler.idle_sleeper = None

    def _detach(self) -> None:
        scheduler = self.scheduler
        for name in (*SPIED, "send_abort_output", "send_control_output"):
            scheduler.__dict__.pop(name, None)
        scheduler.request_receiver = self._originals["request_receiver"]
        scheduler.output_streamer = self._originals["output_streamer"]
        scheduler.ipc_channels = self._channels
        _reset(scheduler)


class _Channels:
    def __init__(self, channels: Any, recorder: Recorder) -> None:
        self._channels = channels
        self.send_to_tokenizer = recorder
        self.send_to_detokenizer = recorder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._channels, name)


def _enter(scheduler: Any, loop: str, run: Run) -> None:
    """As SGLang enters its loops: on this thread, inside the scheduler's stream."""
    scheduler.gracefully_exit = False
    polling = "SGLANG_ENABLE_DISAGG_PREFILL_CONTINUOUS_INPUT_POLLING"
    os.environ[polling] = "1" if loop == "polling" else "0"
    try:
        if loop == "plugin":
            from plugin_loop import enter_plugin_loop

            enter_plugin_loop(scheduler, run)
        else:
            scheduler.run_event_loop()
    finally:
        del os.environ[polling]


def _resources(scheduler: Any) -> dict[str, Any]:
    """What must be the same before and after a run."""
    tree = scheduler.tree_cache
    allocator = scheduler.token_to_kv_pool_allocator
    return {
        "pages": allocator.available_size() + tree.evictable_size(),
        "locked": tree.protected_size(),
        "slots": scheduler.req_to_token_pool.available_size(),
        "metadata": scheduler.req_to_metadata_buffer_idx_allocator.available_size(),
        "waiting": len(scheduler.waiting_queue),
        "bootstrapping": len(scheduler.disagg_prefill_bootstrap_queue.queue),
        "transferring": len(scheduler.disagg_prefill_inflight_queue),
        "results": len(scheduler.result_queue),
        "deferred": len(scheduler._deferred_input_requests),
        "chunked": scheduler.chunked_req is not None,
        "grammars": len(scheduler.grammar_manager.grammar_queue),
        "pending_chunks": len(scheduler.disagg_prefill_pending_chunk_rids),
        "last_batch": scheduler.last_batch is not None,
        "running": len(scheduler.running_batch.reqs),
    }


def _reset(scheduler: Any) -> None:
    """The next run begins with an empty prefix cache."""
    scheduler.gracefully_exit = False
    scheduler._engine_paused = False
    scheduler.last_batch = None
    if scheduler.is_fully_idle():
        scheduler.flush_cache()
    scheduler.forward_ct = 0


# Comparing


def whole(sends: Sequence[Send], length: int, prefix: int = 0) -> bool:
    """The chunks cover `[prefix, length)` once, in order, and the last one alone is marked."""
    position = prefix
    for chunk in sends:
        if chunk.start != position or chunk.end < chunk.start:
            return False
        position = chunk.end
    flags = [chunk.last for chunk in sends]
    return position == length and flags == [False] * (len(flags) - 1) + [True]
