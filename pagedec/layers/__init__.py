"""What models are built from."""
