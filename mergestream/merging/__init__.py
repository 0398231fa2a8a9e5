"""The one driver of a step, for the store, the in-memory Merger and the one-shot merge alike."""
