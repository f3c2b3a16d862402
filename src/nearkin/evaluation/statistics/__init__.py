"""How far a figure can be trusted: bootstrap over classes, binomial intervals, paired comparison."""
