"""Stands in for SGLang's kernels, which load only beside a GPU or with its CPU build.

It must not have `convert_weight_packed`: SGLang takes its native torch paths where that is missing.
"""

from typing import Any

__version__ = "0.0.0"


def __getattr__(name: str) -> Any:
    if name.startswith("__") or name == "convert_weight_packed":
        raise AttributeError(name)

    def absent(*_: object, **__: object) -> object:
        raise NotImplementedError(f"sgl_kernel's {name} is a stand-in")

    return absent
