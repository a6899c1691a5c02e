"""Reports made from what other rooms measure: the pre-flight of a run."""
