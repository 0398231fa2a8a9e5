"""Checkpoints in and out: what is on disk becomes named tensors, and named tensors become files.

Everything is checked from the headers before a single weight is read; nothing is ever unpickled
beyond plain tensors; no path outside the given directory is followed.
"""

from mergestream.checkpoints.checkpoint import (
    DTYPES,
    FLOATS,
    Checkpoint,
    TensorInfo,
    TensorSpec,
    dtype_name,
    float_name,
    torch_dtype,
)
from mergestream.checkpoints.layout import WEIGHT_SUFFIXES
from mergestream.checkpoints.reader import open_checkpoint
from mergestream.checkpoints.writer import SafetensorsWriter

__all__ = [
    "DTYPES",
    "FLOATS",
    "WEIGHT_SUFFIXES",
    "Checkpoint",
    "SafetensorsWriter",
    "TensorInfo",
    "TensorSpec",
    "dtype_name",
    "float_name",
    "open_checkpoint",
    "torch_dtype",
]
