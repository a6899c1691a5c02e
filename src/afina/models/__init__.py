"""Models: where they come from, how they are kept, in which dtype they live, and how they generate."""
