"""The prefill side's links, one for each decode endpoint, and the ZMQ context that they share."""

from __future__ import annotations

import zmq

from aioprefill.kv_layout import KVLayout
from aioprefill.transfer.peer_link import LinkOwner, PeerLink
from aioprefill.transfer.peer_session import SessionState
from aioprefill.wire.security import CurveKeys
from aioprefill.wire.sockets import Context, end_context


class LinkTable:
    """Opens a link when its endpoint is first asked for."""

    def __init__(
        self, owner: LinkOwner, layout: KVLayout, *, lease_s: float, ping_s: float, keys: CurveKeys | None
    ) -> None:
        self._owner = owner
        self._layout = layout
        self._lease_s = lease_s
        self._ping_s = ping_s
        self._keys = keys
        self._links: dict[str, PeerLink] = {}
        self._context: Context | None = None

    def __len__(self) -> int:
        return len(self._links)

    def start(self) -> None:
        """Make links possible."""
        self._context = zmq.Context()

    def open(self, endpoint: str) -> PeerLink:
        """The link to an endpoint. Raises `ConfigError` as `PeerLink.start` does."""
        link = self._links.get(endpoint)
        if link is None:
            assert self._context is not None, "the transfer was not started"
            link = PeerLink(
                endpoint,
                self._owner,
                self._context,
                self._layout,
                keys=self._keys,
                lease_s=self._lease_s,
                ping_s=self._ping_s,
            )
            link.start()
            self._links[endpoint] = link
        return link

    def get(self, endpoint: str) -> PeerLink:
        """The link to an endpoint that has one."""
        return self._links[endpoint]

    def of_agent(self, name: str) -> list[PeerLink]:
        """Links whose peer has this NIXL agent."""
        return [link for link in self._links.values() if link.session.agent == name]

    def drop(self, link: PeerLink) -> None:
        """Close one link and forget it."""
        del self._links[link.endpoint]
        link.close()

    def stats(self) -> dict[str, int]:
        """Number of links, and of those that are usable."""
        ready = sum(link.session.state is SessionState.READY for link in self._links.values())
        return {"peers": len(self._links), "peers_ready": ready}

    async def aclose(self) -> None:
        """Close all links and wait, a moment at most, until what they had to say is out."""
        for link in list(self._links.values()):
            self.drop(link)
        context, self._context = self._context, None
        if context is not None:
            await end_context(context)
