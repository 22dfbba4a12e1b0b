"""Ways to carry tasks to clients and replies back: in memory, as bytes, on Flower."""
