"""What the benchmark `sglang` sees of a loop: the same hooks on SGLang's own methods in every mode.

Host calls are timed by the CPU clock of the scheduler's thread, and count when they did productive work:
something was received, dispatched, launched, processed or retired. Looking in vain does not count.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from aioprefill.bench.sglang_device import DelayedCopy, Device

REQUEST = "TokenizedGenerateReqInput"


@dataclass(slots=True)
class Sight:
    """What was seen so far. Times are nanoseconds of the monotonic clock."""

    received_ns: dict[int, int] = field(default_factory=dict)
    """When each request, by its number, had come to the scheduler: the loop's part ends there."""
    dispatched_ns: dict[int, int] = field(default_factory=dict)
    """When SGLang had dispatched it, its own work: it may be prepared then."""
    copies: list[DelayedCopy] = field(default_factory=list)
    """Of the results that were processed, in order."""
    passes: int = 0
    host_ns: int = 0
    """CPU time of productive host calls."""


class Watch:
    """Hooks a scheduler. `wait_results` is for other threads than the scheduler's."""

    def __init__(self, scheduler: Any, device: Device) -> None:
        self.sight = Sight()
        self._scheduler = scheduler
        self._device = device
        self._wanted = 0
        self._reached = threading.Event()
        self._inside = False
        self._hook_forwards()
        self._hook_calls()

    def wait_results(self, count: int) -> None:
        """Return when so many results have been processed."""
        self._reached.clear()
        self._wanted = count
        if len(self.sight.copies) < count:
            self._reached.wait()

    def _hook_forwards(self) -> None:
        """The model is replaced by one that only takes its time; what is around it is SGLang's own."""
        import torch
        from sglang.srt.layers.logits_processor import LogitsProcessorOutput

        scheduler = self._scheduler
        copy_result = scheduler._copy_result_to_cpu
        runner = scheduler.model_worker.model_runner
        vocabulary = runner.model_config.vocab_size

        def forward(_input_ids: Any, _positions: Any, forward_batch: Any, *_: Any, **__: Any) -> Any:
            return LogitsProcessorOutput(next_token_logits=torch.zeros(forward_batch.batch_size, vocabulary))

        def copy_delayed(result: Any, batch: Any) -> None:
            copy_result(result, batch)
            result.copy_done = self._device.launch()

        runner.model.forward = forward
        scheduler._copy_result_to_cpu = copy_delayed

    def _hook_calls(self) -> None:
        scheduler = self._scheduler
        bootstrap = scheduler.disagg_prefill_bootstrap_queue
        scheduler.request_receiver = WatchedReceiver(scheduler.request_receiver, self)
        scheduler.process_batch_result = self._result_processor(scheduler.process_batch_result)
        scheduler.process_input_requests = self._dispatcher(scheduler.process_input_requests)
        scheduler.run_batch = self.timed(scheduler.run_batch)
        scheduler.launch_batch_sample_if_needed = self.timed(scheduler.launch_batch_sample_if_needed)
        scheduler.process_prefill_chunk = self.timed(scheduler.process_prefill_chunk)
        scheduler.get_next_disagg_prefill_batch_to_run = self.timed(
            scheduler.get_next_disagg_prefill_batch_to_run, lambda plan: plan.batch_to_run is not None
        )
        bootstrap.pop_bootstrapped = self._unless_empty(
            bootstrap.pop_bootstrapped, lambda: bool(bootstrap.queue)
        )
        scheduler.process_disagg_prefill_inflight_queue = self._unless_empty(
            scheduler.process_disagg_prefill_inflight_queue,
            lambda: bool(scheduler.disagg_prefill_inflight_queue),
        )

    def timed(
        self, call: Callable[..., Any], productive: Callable[[Any], bool] = lambda _: True
    ) -> Callable[..., Any]:
        """`call` with its CPU time counted if what it returns is `productive`; not twice inside another."""
        sight, clock = self.sight, time.thread_time_ns

        def watched(*words: Any, **named: Any) -> Any:
            if self._inside:
                return call(*words, **named)
            self._inside = True
            started = clock()
            try:
                found = call(*words, **named)
            finally:
                self._inside = False
            if productive(found):
                sight.host_ns += clock() - started
            return found

        return watched

    def _unless_empty(self, call: Callable[..., Any], filled: Callable[[], bool]) -> Callable[..., Any]:
        """Queues are polled all the time while they are empty, so that is not even timed."""
        timed = self.timed(call, bool)

        def watched(*words: Any, **named: Any) -> Any:
            return timed(*words, **named) if filled() else call(*words, **named)

        return watched

    def _result_processor(self, call: Callable[..., Any]) -> Callable[..., Any]:
        timed, copies = self.timed(call), self.sight.copies

        def watched(batch: Any, result: Any) -> None:
            copy = result.copy_done
            copy.entered_ns = time.monotonic_ns()
            timed(batch, result)
            copies.append(copy)
            if len(copies) == self._wanted:
                self._reached.set()

        return watched

    def _dispatcher(self, call: Callable[..., Any]) -> Callable[..., Any]:
        timed, dispatched_ns = self.timed(call), self.sight.dispatched_ns

        def watched(recv_reqs: list[Any]) -> None:
            if not recv_reqs:
                call(recv_reqs)
                return
            timed(recv_reqs)
            note(recv_reqs, dispatched_ns)

        return watched


class WatchedReceiver:
    """SGLang's own receiver on its own sockets; every pass of a loop asks it once."""

    def __init__(self, receiver: Any, watch: Watch) -> None:
        self.recv_from_tokenizer = receiver.recv_from_tokenizer
        self.recv_from_rpc = receiver.recv_from_rpc
        self._receive = watch.timed(receiver.recv_requests, bool)
        self._sight = watch.sight

    def recv_requests(self, local_reqs: Any = None) -> Any:
        """See SGLang's receiver."""
        self._sight.passes += 1
        received = self._receive(local_reqs=local_reqs)
        if received:
            note(received, self._sight.received_ns)
        return received


def note(messages: list[Any], times_ns: dict[int, int]) -> None:
    """Write down that it is now for these requests."""
    now = time.monotonic_ns()
    for message in messages:
        if type(message).__name__ == REQUEST:
            times_ns[int(message.rid)] = now
