"""nearkin in other people's frameworks: pytorch-metric-learning, Lightning, Hugging Face.

Nothing is imported here: `nearkin.compat.pml` needs the package `pytorch-metric-learning` (the extra `pml`),
`nearkin.compat.lightning` the package `lightning`, `nearkin.compat.huggingface` the package `transformers`.
"""
