"""A router in front of servers: requests pass through to one of them, and are recorded."""
