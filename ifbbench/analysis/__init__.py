"""Analysis: answers about recorded runs, read from their directories alone."""
