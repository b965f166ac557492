"""Pages of results, out of what experiments wrote."""
