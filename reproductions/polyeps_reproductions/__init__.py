"""The papers' figures and tables as experiments, each beside the numbers its paper printed."""
