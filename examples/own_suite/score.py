"""A command that scores a model, for ``--evaluate 'python examples/own_suite/score.py {model} {task}'``."""

import sys
from pathlib import Path

from suite import SUITE

model, task = sys.argv[1:]
print(SUITE.custom_tasks[task].accuracy(Path(model)))
