"""ifbbench replays request traces through an in-flight batching engine and shows what every iteration decided."""

__version__ = "0.1.0"
