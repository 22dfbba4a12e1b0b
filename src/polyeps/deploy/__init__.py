"""A federation of silos on Flower: signed contracts, the silos' policies, and the two programs `silo` and `serve`."""
