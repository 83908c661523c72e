"""Shared fixtures."""

from __future__ import annotations

import pytest

from aioprefill.engine.model_files import ResolvedModel, resolve_model


@pytest.fixture(scope="session")
def embedded_model() -> ResolvedModel:
    """The embedded model, from the user's cache; the first run fetches and converts it (half a minute)."""
    return resolve_model("smollm2-135m-instruct")
