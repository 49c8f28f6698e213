"""One chunk as the scheduler knows it. The only owner of per-request state (written by the planner)."""
