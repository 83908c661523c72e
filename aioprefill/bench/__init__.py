"""Benchmarks: `python -m aioprefill.bench NAME [--json]`. Each prints one shape (see `report`)."""
