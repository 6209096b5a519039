"""Membership of a job whose ranks come and go, inside the ranks: generations, process groups, retried operations."""
