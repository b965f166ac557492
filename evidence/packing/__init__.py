"""Data and weights made ready for experiments."""
