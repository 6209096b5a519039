"""Measurements behind the numbers in the README; each prints one JSON object as the last line of its output."""
