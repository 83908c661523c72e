"""Names that SGLang and transformers import; nothing here works."""

from torchvision.transforms import Compose, InterpolationMode, Normalize, Resize, ToTensor
from torchvision.transforms.v2 import functional

__all__ = ["Compose", "InterpolationMode", "Normalize", "Resize", "ToTensor", "functional"]
