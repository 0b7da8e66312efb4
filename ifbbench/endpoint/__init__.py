"""Load tests of servers: a trace is sent to an endpoint over HTTP."""
