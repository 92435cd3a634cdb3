"""From a configuration and weights to a model whose forward the runner can carry out.

Read in this order:

- `architecture`: what a decoder-only transformer is, as one checked value; `rope_scaling` is a part of it.
- `config_fields`, `gguf_fields`: how a config.json and a GGUF header write it, as far as families agree.
- `family`, `families/`: what a family is, and one short file each.
- `registry`: which family a configuration means, and the model that it becomes; `presets` need no file.
- `model`, `buffers`: what the runner needs of a model, and the tensors that a forward works in.
- `packing`, `rope`, `transformer`: weights and tables as kernels want them, and the forward that most families share.
- `hf/`: any other model of transformers, run by its own modeling code.
"""
