"""Parameter groups, schedules and optimisers."""
