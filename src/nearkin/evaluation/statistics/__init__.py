"""Uncertainty of metrics: bootstrap over classes, binomial intervals, paired comparison."""
