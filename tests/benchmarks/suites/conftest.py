from tests.evaluation.conftest import own_cache  # noqa: F401
