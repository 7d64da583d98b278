"""What the numbers mean: findings drawn from measured runs."""
