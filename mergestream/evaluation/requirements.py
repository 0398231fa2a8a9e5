"""The packages that evaluation needs beyond the core's, and one sentence where one of them is missing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from mergestream.errors import MergestreamError

PACKAGES = {  # module: package, extra that brings it
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


@contextmanager
def missing_packages_told() -> Iterator[None]:
    """Turn a failed import of one of these packages into a sentence that says what to install."""
    try:
        yield
    except ModuleNotFoundError as error:
        known = PACKAGES.get((error.name or "").split(".")[0])
        if known is None:
            raise
        package, extra = known
        raise MergestreamError(f"evaluation needs the package {package}: pip install 'mergestream[{extra}]'") from error
