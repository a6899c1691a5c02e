"""Training: one loop, the run's folder, and the checks that every run makes."""
