"""Names that SGLang and transformers import; nothing here works."""

import enum
from typing import Any


class ImageReadMode(enum.Enum):
    """How torchvision names colour formats."""

    UNCHANGED = 0
    GRAY = 1
    RGB = 3


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)

    def absent(*_: object, **__: object) -> object:
        raise NotImplementedError(f"torchvision's {name} is a stand-in")

    return absent
