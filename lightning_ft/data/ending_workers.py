"""Ends the workers behind an iteration that is over, or given up, at once."""


def end_workers(batches: object) -> None:
    """End the workers of a ``DataLoader``'s iterator, if it has any. May be called twice.

    If that is left to a garbage collection which finds the iterator in a cycle, the queue that brings the news to a worker
    may be closed before, and the process stands still for the five seconds after which torch ends the worker by a signal.
    """
    shut_down = getattr(batches, "_shutdown_workers", None)
    if shut_down is not None:
        shut_down()
