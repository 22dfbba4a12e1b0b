"""The server's linear algebra: subspaces, thin factors, groups of clients, noise levels and weights."""
