"""A run to look into: the run page for a browser, the trace for Perfetto, and the live view of a terminal."""
