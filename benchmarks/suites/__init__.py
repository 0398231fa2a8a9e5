"""The offline suites ``vision`` and ``text``: real models and data out of packages, experts that are trained here."""
