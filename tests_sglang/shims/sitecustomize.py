"""Python runs this when a server's process starts: collecting garbage is a quarter of SGLang's imports."""

import gc

gc.set_threshold(100_000, 20, 20)
