"""Read and write checkpoints: `open_checkpoint` gives named tensors, `SafetensorsWriter` writes them.

Headers are checked before any weight is read, pickles are never executed, and no path outside the given directory is
followed. `layout.FORMATS` lists the file formats.
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
