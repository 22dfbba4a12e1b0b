"""Ways to add noise, each with its exact output law and so its price."""
