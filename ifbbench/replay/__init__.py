"""Replay: offers the requests of a trace to the batch manager when their time has come."""
