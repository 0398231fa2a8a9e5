"""The list of file formats.

To add a format, write a module with a `Shard` (its ``suffixes`` or ``can_read`` recognise a file, its constructor
opens one) and list it here.
"""

from __future__ import annotations

from mergestream.checkpoints.checkpoint import Shard
from mergestream.checkpoints.distributed import DistributedFiles
from mergestream.checkpoints.gguf import GgufFile
from mergestream.checkpoints.safetensors import SafetensorsFile, SafetensorsObject
from mergestream.checkpoints.torch_file import TorchFile

FORMATS: tuple[type[Shard], ...] = (SafetensorsFile, SafetensorsObject, TorchFile, GgufFile, DistributedFiles)
WEIGHT_SUFFIXES = tuple(dict.fromkeys(suffix for file_format in FORMATS for suffix in file_format.suffixes))


def is_weight_file(name: str) -> bool:
    """Whether a file name ends as those of a supported format do."""
    return name.endswith(WEIGHT_SUFFIXES)
