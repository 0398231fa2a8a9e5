from __future__ import annotations

import pytest
from torch import Tensor

from mergestream.testing import make_models


@pytest.fixture
def models() -> list[dict[str, Tensor]]:
    return make_models()
