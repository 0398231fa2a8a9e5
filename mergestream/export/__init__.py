"""From a state to a directory: a source of merged pieces, and a directory that is replaced whole."""
