"""Scores of a model over rows of data."""

from afina.evaluate.evaluate import Scores, compare, evaluate

__all__ = ["Scores", "compare", "evaluate"]
