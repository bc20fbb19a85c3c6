"""The parts that training in FP4 adds to the quantizer: Hadamard transform, stochastic rounding, gradient estimator, outliers."""
