"""Data sets, how they are divided among clients, and the budgets that clients set."""
