"""A completion that is done when a test says so, or at a time of its loop's clock."""

from __future__ import annotations

import asyncio
import time

from aioprefill.errors import DeviceError, HostError
from aioprefill.testing.clock import VirtualLoop


class FakeCompletion:
    """Implements `Completion`. Made on a running loop.

    Counts its polls. `synchronize` passes virtual time on a `VirtualLoop` and really blocks elsewhere.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._future: asyncio.Future[None] = self._loop.create_future()
        self._timer: asyncio.TimerHandle | None = None
        self.due_s: float | None = None
        """When it is going to be done, on the loop's clock; None: not known yet."""
        self.polls = 0
        self.submitted = True
        """False: the sample that it stands for was never handed to the device."""

    def __repr__(self) -> str:
        return f"<FakeCompletion done={self._future.done()} due_s={self.due_s}>"

    def _check_submitted(self) -> None:
        if not self.submitted:
            raise HostError("the completion of a sample was polled that was never submitted")

    @property
    def done(self) -> bool:
        """Complete or failed."""
        return self._future.done()

    def complete(self, at: float | None = None) -> None:
        """Be done now, or at time `at` of the loop's clock."""
        if at is None or at <= self._loop.time():
            if not self._future.done():
                self._future.set_result(None)
            return
        self.due_s = at
        self._timer = self._loop.call_at(at, self.complete)

    def fail(self, error: DeviceError) -> None:
        """Be done now, with an error."""
        self._future.set_exception(error)
        self._future.exception()  # seen: a test need not wait for it

    def query(self) -> bool:
        """See `Completion.query`."""
        self.polls += 1
        self._check_submitted()
        if not self._future.done():
            return False
        self._future.result()
        return True

    async def wait(self) -> None:
        """See `Completion.wait`."""
        self._check_submitted()
        await asyncio.shield(self._future)

    def synchronize(self) -> None:
        """See `Completion.synchronize`. Raises `RuntimeError` when nothing says when it is done."""
        self._check_submitted()
        if not self._future.done():
            if self.due_s is None:
                raise RuntimeError("synchronize() on a fake completion that has no due time")
            late = max(0.0, self.due_s - self._loop.time())
            if isinstance(self._loop, VirtualLoop):
                self._loop.advance(late)
            else:
                time.sleep(late)
            self.complete()
        self._future.result()
