"""What happened in a run: typed events of every slot, one JSON line each."""
