"""The reference decode worker: proves that a hand-off is right. It does not try to be fast."""
