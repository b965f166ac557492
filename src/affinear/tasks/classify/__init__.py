"""Telling what an image shows: one class for each."""
