"""Replays golden files of the batch manager's behaviour: `python -m tests.conformance FILE…`."""
