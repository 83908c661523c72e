"""Names that SGLang and transformers import; nothing here works."""

from typing import Any


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    if name == "InterpolationMode":
        from torchvision.transforms import InterpolationMode

        return InterpolationMode

    def absent(*_: object, **__: object) -> object:
        raise NotImplementedError(f"torchvision's {name} is a stand-in")

    return absent
