"""Checkpoints that are there whole or not at all, and how they are found, checked and read; without Lightning."""
