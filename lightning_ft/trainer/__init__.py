"""What reaches into Lightning's Trainer for strategies and callbacks alike."""
