"""Membership of a job whose ranks come and go: the supervisor's side, and the engine in the ranks."""
