"""Where steps are carried out."""
