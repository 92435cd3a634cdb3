"""Reading model files: where they are, what they hold, and the weights as tensors.

Read in this order:

- `resolve`: from what a user calls a model to its files.
- `files`, `values`, `mapping`: JSON read with named errors, checks of single values, files as memory maps.
- `source`: the one interface of all weights, and the check that they are those that a model needs.
- `safetensors`, `gguf/`, `dummy`: what implements it. `weights` chooses among them.
- `lora`: adapters of linear layers, from PEFT's directories (`peft_config`) or llama.cpp's files (`gguf/adapter`).
- `generation`: what a model's makers recommend for drawing its tokens.
"""
