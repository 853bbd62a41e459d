"""What kernel, agents and ranks say to each other."""
