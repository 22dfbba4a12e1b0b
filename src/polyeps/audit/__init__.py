"""Attempts to refute certificates: enumeration where it is possible, statistics and support where it is not."""
