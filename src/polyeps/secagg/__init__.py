"""Secure aggregation: sums of updates of which the server sees no single one."""
