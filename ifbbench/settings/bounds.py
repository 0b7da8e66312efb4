"""Upper bounds that several settings have: larger values would make arrays that no memory holds, or never end."""

MAX_BEAMS, MAX_BATCH, MAX_WAIT_MS = 1024, 1_000_000, 86_400_000
MAX_REPLICAS = 1024
MAX_SPAN_S = 100 * 365.25 * 86_400  # of all arrivals: later times would lose the precision of latencies
