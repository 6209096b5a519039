"""How a module is sharded over the ranks of a replica, and how its shards outlive a rank; knows nothing of Lightning."""
