"""The one way from the loop into its host: numbers every host call, reads its clock, times it.

`CallRunner` makes a call by its token, the same on the leader, on followers and in a replay. `HostCalls` is
the leader's side: it makes the tokens.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, cast

import msgspec

from aioprefill.errors import DeviceError, HostError
from aioprefill.host import Batch, Forward, Hold, Ingested, PrefillHost, Progress, ReplicatedHost
from aioprefill.recording import Recording
from aioprefill.tp_agree import CallOrder, CallToken

logger = logging.getLogger(__name__)

Observer = Callable[[CallToken, bytes], None]
"""Is told of every call and what it came to (`CallRunner.describe`)."""

RAISED = "raised"
"""Key of the description of a call that raised: it is the last one."""
_PAUSES, _RETRACT, _WEIGHTS = 1, 2, 4
_ADMIT, _STEP = 1, 2


@dataclass(slots=True)
class CallMeter:
    """Durations of host calls, measured by the real clock; they decide nothing."""

    slow_s: float
    calls: int = 0
    slow: int = 0
    total_s: float = 0.0
    longest_s: float = 0.0
    longest_kind: str = ""

    def add(self, kind: str, seconds: float) -> None:
        """Count one call."""
        self.calls += 1
        self.total_s += seconds
        if seconds > self.longest_s:
            self.longest_s, self.longest_kind = seconds, kind
        if seconds > self.slow_s:
            self.slow += 1
            logger.debug("host call %s took %.1f ms", kind, seconds * 1e3)


class CallProgress(Protocol):
    """Where a rank says how far it has come; its watch thread reads it."""

    forward: int | None
    """The oldest forward in flight."""

    def begin_call(self, kind: str) -> None:
        """A host call begins."""

    def end_call(self, number: int) -> None:
        """Host call `number` has ended."""


class CallRunner:
    """Makes host calls by their tokens. Keeps what one call hands to a later one: batch and forwards."""

    def __init__(self, host: PrefillHost, meter: CallMeter, progress: CallProgress | None = None) -> None:
        self._host = host
        self._meter = meter
        self._progress = progress
        self._batch: Any = None
        self._forwards: dict[int, Forward] = {}
        self.observers: list[Observer] = []

    @property
    def forwards(self) -> dict[int, Forward]:
        """Launched forwards whose result is not processed, by number, in launch order."""
        return self._forwards

    def run(self, token: CallToken) -> Any:
        """Make the call; its result. What the host raises passes through."""
        progress, started = self._progress, time.perf_counter()
        if progress is not None:
            progress.begin_call(token.kind)
        try:
            result = self._call(token)
        except Exception as error:
            self._tell(token, msgspec.msgpack.encode({RAISED: f"{type(error).__name__}: {error}"}))
            raise
        finally:
            self._meter.add(token.kind, time.perf_counter() - started)
            if progress is not None:
                progress.end_call(token.number)
                progress.forward = next(iter(self._forwards), None)
        if self.observers:
            self._tell(token, self._describe(token, result))
        return result

    def _tell(self, token: CallToken, description: bytes) -> None:
        for observer in self.observers:
            observer(token, description)

    def _call(self, token: CallToken) -> Any:
        host, now, flags = self._host, token.now, token.flags
        match token.kind:
            case "ingest":
                hold = Hold(bool(flags & _PAUSES), bool(flags & _RETRACT), bool(flags & _WEIGHTS))
                result = host.ingest(now, hold=hold)
                for _ in range(result.consumed):
                    del self._forwards[next(iter(self._forwards))]
                return result
            case "prepare":
                last = None if token.detail < 0 else token.detail
                self._batch = host.prepare(
                    now, last=last, admit=bool(flags & _ADMIT), scheduling_step=bool(flags & _STEP)
                )
                return self._batch
            case "launch":
                forward = host.launch(now, self._batch, token.detail)
                self._forwards[token.detail] = forward
                return forward
            case "process_result":
                return host.process_result(now, self._forwards.pop(token.detail))
            case "fail_result":
                assert token.error is not None
                name, message, sticky = token.error
                error = DeviceError(name, message, sticky=sticky)
                return host.fail_result(now, self._forwards.pop(token.detail), error)
            case kind if kind in _PLAIN_CALLS:
                return getattr(host, kind)(now)
            case kind:
                raise HostError(f"there is no host call {kind!r}: do the ranks run one version?")

    def _describe(self, token: CallToken, result: Any) -> bytes:
        """What the call came to, as far as ranks must agree on it."""
        match token.kind:
            case "prepare":
                return b"" if result is None else cast(ReplicatedHost, self._host).describe(result)
            case "ingest" | "progress_transfers" | "collect_bootstrapped":
                return msgspec.msgpack.encode(result)
            case _:
                return b""


_PLAIN_CALLS = frozenset(
    {"collect_bootstrapped", "progress_transfers", "on_idle", "begin_drain", "end_drain", "restart"}
)
"""Host calls that have no arguments; a token names no other method."""


class HostCalls:
    """Host calls with the clock reading and the number that the call order gives them.

    With `send` every token goes there, with the host's facts, before the call is made. A `recording` that
    wants the host restarted has it so behind the call after which the host is at rest.
    """

    def __init__(
        self,
        host: PrefillHost,
        order: CallOrder,
        clock: Callable[[], float],
        runner: CallRunner,
        send: Callable[[CallToken], None] | None = None,
        recording: Recording | None = None,
    ) -> None:
        self._host = host
        self._order = order
        self._clock = clock
        self._runner = runner
        self._send = send
        self._recording = recording
        self.agreed = 0
        """Forwards whose votes are over; the loop counts them."""

    def now(self) -> float:
        """The loop's clock, seconds."""
        return self._clock()

    def _call(
        self, kind: str, detail: int = -1, flags: int = 0, error: tuple[str, str, bool] | None = None
    ) -> Any:
        result = self._make(kind, detail, flags, error)
        recording = self._recording
        if recording is not None and recording.wants_restart and cast(ReplicatedHost, self._host).at_rest():
            self._make("restart")
        return result

    def _make(
        self, kind: str, detail: int = -1, flags: int = 0, error: tuple[str, str, bool] | None = None
    ) -> Any:
        send = self._send
        facts = b"" if send is None else cast(ReplicatedHost, self._host).take_facts()
        token = self._order.append(kind, self._clock(), detail, flags, self.agreed, facts, error)
        if send is not None:
            send(token)
        return self._runner.run(token)

    def ingest(self, *, hold: Hold) -> Ingested:
        """See `PrefillHost.ingest`."""
        flags = _PAUSES * hold.pauses | _RETRACT * hold.retract | _WEIGHTS * hold.weights
        return cast(Ingested, self._call("ingest", flags=flags))

    def collect_bootstrapped(self) -> int:
        """See `PrefillHost.collect_bootstrapped`."""
        return cast(int, self._call("collect_bootstrapped"))

    def prepare(self, *, last: int | None, admit: bool, scheduling_step: bool) -> Batch | None:
        """See `PrefillHost.prepare`. What it returns is what `launch` launches."""
        flags = _ADMIT * admit | _STEP * scheduling_step
        return cast(Batch | None, self._call("prepare", -1 if last is None else last, flags))

    def launch(self, number: int) -> Forward:
        """See `PrefillHost.launch`: the batch that was prepared last."""
        return cast(Forward, self._call("launch", number))

    def process_result(self, forward: Forward) -> None:
        """See `PrefillHost.process_result`."""
        self._call("process_result", forward.number)

    def fail_result(self, forward: Forward, error: DeviceError) -> None:
        """See `PrefillHost.fail_result`."""
        message = str(error).removeprefix(f"{error.name}: ")
        self._call("fail_result", forward.number, error=(error.name, message, error.sticky))

    def progress_transfers(self) -> Progress:
        """See `PrefillHost.progress_transfers`."""
        return cast(Progress, self._call("progress_transfers"))

    def on_idle(self) -> None:
        """See `PrefillHost.on_idle`."""
        self._call("on_idle")

    def begin_drain(self) -> None:
        """See `PrefillHost.begin_drain`."""
        self._call("begin_drain")

    def end_drain(self) -> None:
        """See `PrefillHost.end_drain`."""
        self._call("end_drain")
