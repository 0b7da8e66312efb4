"""A run to look into: the run page for a browser, and the live view of a terminal."""
