"""KV hand-off from a prefill to a decode instance: the port, NIXL, and the in-process twin."""
