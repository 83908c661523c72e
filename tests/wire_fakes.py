"""A scheduler whose handles the test settles, a decode worker that streams what it is told, a raw client."""

from __future__ import annotations

import asyncio

import zmq

from aioprefill.errors import InvalidRequest, RequestAborted
from aioprefill.request import HandoffResult, PrefillHandle, PrefillResult
from aioprefill.wire.messages import Abort, Attach, Finished, Token, Welcome, decode, encode
from aioprefill.wire.prefill_service import PrefillService
from aioprefill.wire.pump import ZmqPump
from aioprefill.wire.server import WireServer
from aioprefill.wire.sockets import SocketLimits

ANY_PORT = "tcp://127.0.0.1:0"
FAST_HEARTBEAT = SocketLimits(heartbeat_ms=100, heartbeat_timeout_ms=300)


def welcome(role="prefill", epoch="e1"):
    """A `Welcome` of a small model."""
    return Welcome(role, epoch, "tiny", "f" * 8, 32000, 4096, (2,))


class FakeScheduler:
    """Remembers requests and handles by id; an abort settles its request at once."""

    def __init__(self):
        self.requests = {}
        self.handles = {}
        self.aborts = []
        self.error = None

    def submit(self, request):
        """As `PrefillScheduler.submit`; raises `error` when it is set."""
        if self.error is not None:
            raise self.error
        live = self.handles.get(request.request_id)
        if live is not None and not live.done:
            raise InvalidRequest("request_id", f"{request.request_id!r} is live already")
        handle = PrefillHandle(request.request_id, asyncio.get_running_loop().time(), self.abort)
        self.requests[request.request_id] = request
        self.handles[request.request_id] = handle
        return handle

    def abort(self, request_id, reason):
        """As the host: note it and end the request."""
        self.aborts.append((request_id, reason))
        self.handles[request_id].fail(RequestAborted(reason))

    def publish(self, request_id, token_id=7):
        """The first token is there, 5 ms after the arrival."""
        handle, request = self.handles[request_id], self.requests[request_id]
        at = handle.arrival_s
        handle.publish(
            PrefillResult(
                request_id,
                token_id,
                -0.5,
                ((7, -0.5), (8, -1.5)),
                len(request.token_ids),
                16,
                at,
                at + 0.002,
                at + 0.005,
            )
        )

    def finish(self, request_id):
        """The hand-off is done, 9 ms after the arrival."""
        handle = self.handles[request_id]
        handle.finish(HandoffResult(request_id, handle.arrival_s + 0.009, 4096))

    def service(self, endpoint=ANY_PORT, **options):
        """This scheduler on the wire."""
        options.setdefault("welcome", welcome())
        return PrefillService(endpoint, submit=self.submit, stats=self.stats, **options)

    def stats(self):
        """One number of each kind, and something that is neither a number nor a text."""
        return {"live": len(self.handles), "ratio": 0.5, "nothing": None}


class FakeDecode:
    """A decode worker: notes attachments and aborts, streams what it is told."""

    def __init__(self, endpoint=ANY_PORT, **options):
        self.attached = {}
        self.aborted = []
        self.gone = []
        self.server = WireServer(
            endpoint,
            {Attach: self._on_attach, Abort: lambda _, m: self.aborted.append(m.request_id)},
            welcome=welcome("decode", "d1"),
            on_gone=self.gone.append,
            **options,
        )

    def _on_attach(self, identity, message):
        self.attached[message.request_id] = identity

    def stream(self, request_id, token_ids):
        """Send all tokens, and the end."""
        for index, token_id in enumerate(token_ids):
            self.server.send(self.attached[request_id], Token(request_id, index, token_id))
        self.server.send(self.attached[request_id], Finished(request_id, "eos", len(token_ids)))


class RawClient:
    """A DEALER that sends any bytes and collects decoded answers."""

    def __init__(self, context, endpoint):
        self.socket = context.socket(zmq.DEALER)
        self.got = []
        self.pump = ZmqPump(self.socket, lambda frames: self.got.append(decode(frames[-1])), name="raw")
        self.socket.connect(endpoint)
        self.pump.start()

    def send(self, *messages):
        """Messages or raw frames, one ZMQ message each."""
        for message in messages:
            self.pump.send([message if isinstance(message, bytes) else encode(message)])

    def of(self, kind):
        """Answers of one type."""
        return [message for message in self.got if isinstance(message, kind)]
