"""What fits, before anything is run: the size of the KV cache, and how many requests run in it at once."""
