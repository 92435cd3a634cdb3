"""The command line: a thin shell over the library. Nothing here is imported by the rest."""
