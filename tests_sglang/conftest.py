"""One real scheduler for all tests of this folder: it takes 15 s to make, a run on it a fraction of one."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import pytest

warnings.filterwarnings("ignore")
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent / "stubs")]

import engine  # noqa: E402  behind the paths of the stand-ins
from tiny_model import make_tiny_model  # noqa: E402


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model's folder."""
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def bench(model: Path) -> object:
    """Loops run on this one after the other; each must leave it clean."""
    from harness import Bench

    return Bench(engine.make_scheduler(model))
