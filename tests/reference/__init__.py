"""Each paper's pseudocode as a slow plain loop, to compare with."""
