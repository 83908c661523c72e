"""A NIXL agent for an event loop: one thread owns it, the loop posts commands and gets events back.

NIXL has no descriptor to wait on and its own progress thread spins, so the owner polls: each millisecond
while something moves, five times slower when nothing has moved for a second, and else only on a slow
tick. A command wakes it at once.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import importlib
import queue
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType
from typing import Any

from aioprefill.completion import cuda_runtime
from aioprefill.errors import ConfigError
from aioprefill.transfer.agent_events import AgentEvent, AgentStopped, RemotePool, WriteOrder
from aioprefill.transfer.nixl_environment import prepare_environment
from aioprefill.transfer.nixl_owner import NixlOwner
from aioprefill.transfer.pool_view import PoolView

POLL_S = 0.001
STALLED_POLL_S = 0.005
STALLED_AFTER_S = 1.0
IDLE_S = 0.25
MOVED_S = 0.0001
"""A poll that used more CPU time than this moved data: the next one follows without a pause."""
COMMANDS_PER_TURN = 256

Command = Callable[[NixlOwner], None]


def load_nixl(memory: str = "DRAM") -> ModuleType:
    """Import nixl; takes seconds the first time. Raises `ConfigError` where it cannot be imported."""
    prepare_environment(memory=memory)
    try:
        return importlib.import_module("nixl")
    except ImportError as err:
        raise ConfigError(
            f"KV transfer nixl needs the package nixl ({err}): pip install --no-deps nixl nixl-cu13"
        ) from err


class NixlAgent:
    """An agent named `name` with `pool` registered.

    `prepare`, then `start` on the loop, then the other methods from the loop's thread; each returns at
    once. Close it, or its thread outlives the loop (it ends when the main thread does). `library` stands
    in for the nixl module in tests.
    """

    def __init__(self, name: str, pool: PoolView, *, library: ModuleType | Any | None = None) -> None:
        self.name = name
        self.pool = pool
        self._library = library
        self._commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._ready: concurrent.futures.Future[bytes] = concurrent.futures.Future()
        # not a daemon: one that dies inside NIXL at exit takes the interpreter down with a crash
        self._thread = threading.Thread(target=self._run, name=f"nixl {name}", daemon=False)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._on_events: Callable[[Sequence[AgentEvent]], None] = lambda events: None
        self._expecting = False
        self._closed = False
        self._ended: asyncio.Future[None] | None = None
        self._remains: NixlOwner | None = None

    def prepare(self) -> None:
        """Import NIXL, create the agent and register the pool; idempotent. Blocks for up to seconds.

        Call it before serving, or in an executor. Raises `ConfigError` when NIXL cannot run here.
        """
        if not self._thread.is_alive() and not self._ready.done():
            self._thread.start()
        self._ready.result()

    @property
    def metadata(self) -> bytes:
        """What another agent needs to reach this one; after `prepare`."""
        return self._ready.result(timeout=0)

    def start(self, on_events: Callable[[Sequence[AgentEvent]], None]) -> None:
        """Deliver events to `on_events` on the running loop. Prepares first, where that was not done."""
        self.prepare()
        self._loop = asyncio.get_running_loop()
        self._on_events = on_events

    def add_remote(self, remote: RemotePool) -> None:
        """See `NixlOwner.add_remote`."""
        self._put(partial(NixlOwner.add_remote, spec=remote))

    def remove_remote(self, name: str, *, grace_s: float) -> None:
        """Forget a remote when its writes are terminal, or after `grace_s`: its process is dead by then."""
        self._commands.put(partial(NixlOwner.remove_remote, name=name, remove_at=time.monotonic() + grace_s))

    def write(self, remote: str, order: WriteOrder) -> None:
        """See `NixlOwner.write`."""
        self._put(partial(NixlOwner.write, name=remote, order=order))

    def drop_unposted(self, remote: str, ticket: int) -> None:
        """See `NixlOwner.drop_unposted`."""
        self._put(partial(NixlOwner.drop_unposted, name=remote, ticket=ticket))

    def probe(self, name: str, metadata: bytes) -> None:
        """See `NixlOwner.probe`."""
        self._put(partial(NixlOwner.probe, name=name, metadata=metadata))

    def end_probe(self, name: str) -> None:
        """See `NixlOwner.end_probe`."""
        self._put(partial(NixlOwner.end_probe, name=name))

    def expect(self, expecting: bool) -> None:
        """Say whether others may be writing into the pool: over tcp their data only lands while we poll."""
        if expecting != self._expecting:
            self._expecting = expecting
            self._put(lambda owner: None)

    def _put(self, command: Command) -> None:
        if self._remains is None:
            self._commands.put(command)
        elif self._loop is not None:  # the thread is gone: a closed owner still answers what must be answered
            command(self._remains)
            self._loop.call_soon(self._on_events, self._remains.take_events())

    async def aclose(self) -> None:
        """Destroy the agent and end the thread. Live writes end with it. Idempotent.

        Events of what was still open are delivered first. Cancelling the wait leaves the closing under way.
        """
        loop = asyncio.get_running_loop()
        if self._loop is not loop:  # never started on this loop: nothing would tell it of the end
            await loop.run_in_executor(None, self.close)
            return
        if not self._thread.is_alive():
            return
        if self._ended is None:
            self._ended = loop.create_future()
            self._close()
        await asyncio.shield(self._ended)
        self._thread.join()

    def close(self) -> None:
        """The same for callers without a loop: blocks until the thread has ended."""
        self._close()
        if self._thread.is_alive():
            self._thread.join()

    def _close(self) -> None:
        if not self._closed:
            self._closed = True
            self._commands.put(None)

    # --- the owner thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            owner = self._create()
        except BaseException as err:
            self._ready.set_exception(err)
            return
        self._ready.set_result(owner.metadata)
        try:
            self._serve(owner)
        except Exception as err:
            self._deliver([AgentStopped(f"{type(err).__name__}: {err}")])
        finally:
            owner.close()
            self._deliver(owner.take_events())
            self._on_loop(lambda: self._report_end(owner))

    def _create(self) -> NixlOwner:
        library = self._library or load_nixl(self.pool.memory)
        try:
            if self.pool.memory == "VRAM":
                cuda_runtime().cudaSetDevice(self.pool.device_id)
            return NixlOwner(library, self.name, self.pool)
        except ConfigError:
            raise
        except Exception as err:
            raise ConfigError(
                f"KV transfer nixl cannot start ({type(err).__name__}: {err}): check UCX_TLS and"
                " UCX_NET_DEVICES (the network interface must exist), and that the pool's memory is valid"
            ) from err

    def _serve(self, owner: NixlOwner) -> None:
        pause_s, moved_at = IDLE_S, time.monotonic()
        while self._obey(owner, pause_s):
            now, before_s = time.monotonic(), time.thread_time()
            owner.progress(now)
            moved = time.thread_time() - before_s > MOVED_S
            events = owner.take_events()
            self._deliver(events)
            if moved or events:
                moved_at = now
            if not (owner.busy or self._expecting):
                pause_s, moved_at = IDLE_S, now
            elif moved:
                pause_s = 0.0
            else:
                pause_s = POLL_S if now - moved_at < STALLED_AFTER_S else STALLED_POLL_S

    def _obey(self, owner: NixlOwner, pause_s: float) -> bool:
        """Wait at most `pause_s` for commands and carry out those that are there; False to end."""
        timeout_s = pause_s
        for _ in range(COMMANDS_PER_TURN):
            try:
                command = self._commands.get(timeout=timeout_s) if timeout_s else self._commands.get_nowait()
            except queue.Empty:
                break
            if command is None:
                return False
            command(owner)
            timeout_s = 0.0
        # a forgotten close must not keep the process from ending
        return threading.main_thread().is_alive()

    def _deliver(self, events: Sequence[AgentEvent]) -> None:
        if events:
            self._on_loop(lambda: self._on_events(events))

    def _on_loop(self, callback: Callable[[], None]) -> None:
        if self._loop is None:
            return
        try:
            self._loop.call_soon_threadsafe(callback)
        except RuntimeError:
            self._loop = None  # closed without closing us: nobody listens any more

    def _report_end(self, owner: NixlOwner) -> None:
        """On the loop, which alone posts commands: what the thread did not get to is answered here."""
        self._remains = owner
        while not self._commands.empty():
            command = self._commands.get_nowait()
            if command is not None:
                command(owner)
        self._on_events(owner.take_events())
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(None)
