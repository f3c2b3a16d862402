"""Where the rows of a gallery are kept and searched: SQLite with an index in memory, or PostgreSQL."""
