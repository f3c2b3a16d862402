"""nearkin in other people's frameworks: pytorch-metric-learning, Lightning, Hugging Face.

Nothing is imported here: `from nearkin.compat.pml import losses` needs torch alone, `nearkin.compat.lightning` the
package `lightning`, `nearkin.compat.huggingface` the package `transformers`.
"""
