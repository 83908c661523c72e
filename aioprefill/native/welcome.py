"""What a server of a model says to those who connect."""

from __future__ import annotations

import uuid

from aioprefill.engine.port import ModelSpec
from aioprefill.version import __version__
from aioprefill.wire.messages import Welcome


def welcome_of(role: str, spec: ModelSpec) -> Welcome:
    """The answer to a client's hello; its epoch is new each time."""
    return Welcome(
        role=role,
        epoch=uuid.uuid4().hex,
        model=spec.name,
        fingerprint=spec.layout.fingerprint,
        vocab_size=spec.vocab_size,
        context_length=spec.context_length,
        eos_token_ids=spec.eos_token_ids,
        software=f"aioprefill {__version__}",
    )
