"""Schedulers: one package for each engine whose rules they follow."""
