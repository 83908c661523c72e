"""The drop-in: aioprefill's loop inside SGLang's prefill scheduler, by SGLang's own plugin entry point.

Importing this package imports neither SGLang nor torch; its modules load SGLang where its scheduler runs.
"""
