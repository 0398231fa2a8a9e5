"""Benchmarks: merge the experts of a suite in many orders and score every task after each step.

* ``suites``: a base, experts and how to score them; ``rows``: methods to compare
* ``bench`` runs ``streams`` (one method in one order) in parallel
* ``results``: all measurements and their metrics; ``tables``: tables of them
"""
