"""Who takes part: clients' budgets, data and how data is divided among them."""
