"""Wing."""
