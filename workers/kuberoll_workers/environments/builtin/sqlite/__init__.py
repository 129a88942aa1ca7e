"""Questions about databases, answered by queries of SQLite."""
