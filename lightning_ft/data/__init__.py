"""Which rank trains which data, so that every sample is trained exactly once an epoch whoever dies or joins."""

from lightning_ft.data.position import LoaderState, resume_batches

__all__ = ["LoaderState", "resume_batches"]
