"""Stands in for torchvision, which SGLang imports and text models never call."""

__version__ = "0.0.0"
