"""The device side: the step's tensors live here and nowhere else."""
