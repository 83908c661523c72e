"""Recordings of what a scheduler decides, and their replay without a model. Imports no torch."""
