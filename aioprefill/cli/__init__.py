"""The command line. One file per command; what they do is elsewhere and is imported when it is asked for."""

from aioprefill.cli.app import app, main

__all__ = ["app", "main"]
