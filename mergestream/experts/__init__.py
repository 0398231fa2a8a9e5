"""From what a user names as an expert to its task vector Δ = θ − θ⁰: full checkpoints, adapters."""
