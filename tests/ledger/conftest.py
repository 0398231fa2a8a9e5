from tests.workshop import workshop  # noqa: F401
