"""What the loop needs of a recording: to be told of every host call and what it came to. Pure."""

from __future__ import annotations

from typing import Protocol

from aioprefill.tp_agree import CallToken


class Recording(Protocol):
    """Takes the call order down as it is made. Implemented over files by `record.recorder`."""

    def called(self, token: CallToken, description: bytes) -> None:
        """A host call was made, or raised; `description` is what it came to (`CallRunner`). Never blocks."""

    @property
    def wants_restart(self) -> bool:
        """It would begin a new file at the next `restart` of the host, and should soon."""

    def close(self) -> None:
        """Nothing more will come. Idempotent."""
