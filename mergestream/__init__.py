"""Merge fine-tuned models into one model as they arrive."""

__version__ = "0.1.0"
