"""nearkin: learn embeddings in which kin stand near."""

__version__ = "0.1.0"
