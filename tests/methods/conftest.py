from __future__ import annotations

import pytest
from torch import Tensor

from tests.methods.models import make_models


@pytest.fixture
def models() -> list[dict[str, Tensor]]:
    return make_models()
