"""What the benchmarks share: jobs, workers, a cache of finished pieces, scores and tables."""
