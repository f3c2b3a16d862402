"""Several protocols over one set of stored embeddings, as `nearkin evaluate` runs them."""
