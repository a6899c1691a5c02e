"""Training: one loop, the run's folder, and the checks that every run makes."""

from afina.callable_room import make_callable

make_callable(__name__)
