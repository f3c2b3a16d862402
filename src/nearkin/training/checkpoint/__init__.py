"""Checkpoints: what a training saves, as one file or sharded over ranks."""
