"""Benchmarks: merge the experts of a suite in many orders and score every task after each step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from mergestream.errors import MergestreamError

PACKAGES = {  # module: package, extra that installs it
    "transformers": ("transformers", "evaluate"),
    "tokenizers": ("tokenizers", "evaluate"),
    "matplotlib": ("matplotlib", "evaluate"),
    "pyarrow": ("pyarrow", "evaluate"),
    "PIL": ("pillow", "evaluate"),
    "yaml": ("pyyaml", "evaluate"),
    "huggingface_hub": ("huggingface_hub", "clip"),
    "onnx": ("onnx", "suites"),
    "peft": ("peft", "suites"),
}
"""Optional packages that evaluation imports"""


@contextmanager
def explain_missing_packages() -> Iterator[None]:
    """Turn a failed import of an optional package into a sentence that says what to install."""
    try:
        yield
    except ModuleNotFoundError as error:
        known = PACKAGES.get((error.name or "").split(".")[0])
        if known is None:
            raise
        package, extra = known
        raise MergestreamError(f"evaluation needs the package {package}: pip install 'mergestream[{extra}]'") from error
