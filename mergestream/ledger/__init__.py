"""Every expert remembered by its leading directions, and readouts: pure functions of what is remembered."""
