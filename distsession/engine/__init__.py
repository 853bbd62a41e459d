"""What runs in an agent or on a rank."""
