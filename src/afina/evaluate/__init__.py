"""Scores of a model over rows of data."""

from afina.callable_room import make_callable

make_callable(__name__)
