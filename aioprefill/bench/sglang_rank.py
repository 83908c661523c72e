"""Entry of a rank's process in the benchmark `sglang`: importing SGLang takes half as long without garbage
collection, which is on again when the loop starts."""

from __future__ import annotations

import gc

if __name__ == "__main__":
    gc.disable()
    from aioprefill.bench.sglang_process import main

    main()
