"""The mathematics that must be fast, and the slow reference that judges it."""
