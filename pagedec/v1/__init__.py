"""The stubs of the contract in `proto/`, made by `proto/generate.py`."""
