"""The ledger, which keeps an entry per expert, and the readouts that merge the entries."""
