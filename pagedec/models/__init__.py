"""Model families, one short file each."""
