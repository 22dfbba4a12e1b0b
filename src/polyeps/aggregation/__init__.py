"""The server's linear algebra: subspaces, low-rank factors, client groups, noise estimates and weights."""
