"""Shared fixtures."""

from __future__ import annotations

from pathlib import Path

import pytest

from aioprefill.engine.model_files import ResolvedModel, resolve_model

pytest_plugins = ["aioprefill.testing.plugin"]


@pytest.fixture(scope="session")
def embedded_model() -> ResolvedModel:
    """The embedded model, from the user's cache; the first run fetches and converts it (half a minute)."""
    return resolve_model("smollm2-135m-instruct")


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random Llama: 2 layers, 4 heads, 2 KV heads, fp32."""
    from aioprefill.testing.models import make_tiny_llama

    return make_tiny_llama(tmp_path_factory.mktemp("models") / "tiny-llama")
