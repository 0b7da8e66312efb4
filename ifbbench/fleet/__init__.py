"""Fleets: the routers that choose the replica of each request, and what they know of replicas."""
