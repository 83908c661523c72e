"""Names that SGLang and transformers import; nothing here works."""

import enum

from torchvision.transforms import functional

__all__ = ["Compose", "InterpolationMode", "Normalize", "Resize", "ToTensor", "functional"]


class InterpolationMode(enum.Enum):
    """How torchvision names its filters."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


class _Absent:
    def __init__(self, *_: object, **__: object) -> None:
        raise NotImplementedError("this is a stand-in for torchvision")


class Compose(_Absent): ...


class Normalize(_Absent): ...


class Resize(_Absent): ...


class ToTensor(_Absent): ...
