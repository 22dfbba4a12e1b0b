"""Who takes part, and with what: clients' budgets, data sets, and the ways to divide them among clients."""
