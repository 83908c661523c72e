"""Tensor-parallel ranks: how their processes find each other, talk, and notice that one is lost."""
