"""pytest fixtures, loaded by `-p aioprefill.testing.plugin`."""

from __future__ import annotations
