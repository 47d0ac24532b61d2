"""Predict, measure and explain how a serving engine decodes tokens.

`predict` is arithmetic on paper, `measure` runs a real batched decode loop on this machine, and
`explain` draws both. Import the wing you need: this package itself loads nothing.
"""

__version__ = "0.1.0"
