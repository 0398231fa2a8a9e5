"""Reports, diagnostics, gates and comparisons of a store.

* ``facts``: all data of a report; ``verdict`` has its first lines, ``sections`` the rest
* ``render``: the page and Markdown, from ``templates``; ``tables``: how names, numbers and tables are written
* ``diagnostics``: similarity of the experts, and the share of each that was kept
* ``scores``: evaluations that are attached to a store, and the results of lm-eval
* ``gates``: conditions under which ``add`` refuses an expert
* ``diff``: compare two steps, or a step and a checkpoint
"""
