"""The gap between trainer and sampler: the log-probabilities that both give to the same sampled tokens."""
