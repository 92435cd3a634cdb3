"""One short file a family: how its configurations are read, and where it differs from the transformer that most are.

Read `llama` first, then any other; `gpt2` is the one with a forward of its own. registry.py lists them all.
"""
