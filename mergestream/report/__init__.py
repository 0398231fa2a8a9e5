"""Pictures and numbers to decide by: reports, diagnostics, gates, comparisons.

* ``diagnostics``: similarity of the experts, and what survived of each
* ``ledger``: what a ledger holds of each expert, and how they collide
* ``metrics``: ACC, BWT and others, from the accuracy matrix
* ``scores``: evaluations that are attached to a store
* ``gates``: conditions under which ``add`` refuses
* ``diff``: two steps, or a step and a checkpoint
* ``facts``: all that a report tells; ``markdown`` and ``page`` write it
* ``figures`` (plotly) and ``pictures`` (matplotlib): functions that return figure objects
"""
