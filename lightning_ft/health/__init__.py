"""What a training tells about itself: whether restarts went unnoticed, who is slow, and where the time went."""
