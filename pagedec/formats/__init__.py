"""Reading model files: where they are, what they hold, and the weights as tensors."""
