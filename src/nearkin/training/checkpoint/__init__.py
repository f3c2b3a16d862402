"""Checkpoints: what a trainer saves, as one file or sharded over ranks."""
