"""What decides a run: the recipe, what it can name, its defaults, and what is refused."""
