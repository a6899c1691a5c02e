"""Scores of a model over rows of data."""

from afina.callable_room import make_callable
from afina.evaluate.evaluate import Scores, compare, evaluate

__all__ = ["Scores", "compare", "evaluate"]

make_callable(__name__)
