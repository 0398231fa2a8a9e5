"""The offline suites: real models and data from packages, and experts that are trained locally."""
