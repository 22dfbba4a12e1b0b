"""Who takes part, and with what: data sets and the ways to divide them among clients."""
