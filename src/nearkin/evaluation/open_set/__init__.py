"""Open-set identification: searches of enrolled and of unknown classes in a gallery of labels."""
