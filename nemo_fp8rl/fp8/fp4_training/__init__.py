"""Parts of training in FP4: Hadamard transform, stochastic rounding, gradient estimator, outliers."""
