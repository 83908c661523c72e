"""The storage tier: evicted prefix pages on disk, and their way back."""
