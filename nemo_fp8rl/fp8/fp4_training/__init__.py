"""What training in FP4 adds to the quantizer: Hadamard transform, stochastic rounding, estimator, outliers."""
