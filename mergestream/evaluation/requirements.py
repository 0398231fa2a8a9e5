"""The packages that evaluation needs beyond the core's, and one sentence where one of them is missing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from mergestream.errors import MergestreamError

PACKAGES = {
    "transformers": "transformers",
    "tokenizers": "tokenizers",
    "matplotlib": "matplotlib",
    "pyarrow": "pyarrow",
    "PIL": "pillow",
    "onnx": "onnx",
    "yaml": "pyyaml",
    "huggingface_hub": "huggingface_hub",
}


@contextmanager
def missing_packages_told() -> Iterator[None]:
    """Turn a failed import of one of these packages into a sentence that says what to install."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = PACKAGES.get((error.name or "").split(".")[0])
        if package is None:
            raise
        extra = "clip" if package == "huggingface_hub" else "evaluate"
        raise MergestreamError(f"evaluation needs the package {package}: pip install 'mergestream[{extra}]'") from error
