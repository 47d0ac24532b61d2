"""Predict, measure and explain how a serving engine decodes tokens.

`predict` is arithmetic on paper, `measure` runs a real batched decode loop on this machine, and
`explain` draws both. Import the wing you need: this package itself loads nothing.
"""

import os

__version__ = "0.1.0"

# Threads that spin while they wait fight a busy neighbour for its core, and a decode step takes
# several times as long. Set before torch is loaded; an explicit choice is kept.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
