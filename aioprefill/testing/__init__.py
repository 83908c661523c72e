"""Public fakes for tests: host, completion, engine, transfer, virtual clock, and a pytest plugin."""
