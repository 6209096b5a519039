"""Which rank trains which data, so that every sample is trained exactly once an epoch whoever dies or joins."""
