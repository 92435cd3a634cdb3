"""GGUF files, wholly: their header, what it says of model and tokenizer, and their tensors as Hugging Face has them.

Read in this order:

- `header`: the file's fields and where its tensors lie, every length checked.
- `parts`: a model in several files.
- `metadata`: what the fields say of the model. What that means in ours is said in models/gguf_fields.py and by each
  family.
- `tensor_names`: what tensors are called and how they are laid out, by architecture.
- `dequantize`, `reader`: from encoded bytes to values; a file, or a model's several, as a source of weights.
- `adapter`: LoRA adapters, which are files of their own.
- `converted`: the dequantised form that is kept for later starts.
- `vocabulary`, `byte_level`, `sentencepiece`, `build_tokenizer`: the tokenizer that the file describes, as the
  `tokenizers` library has it. text/tokenizer.py makes ours of it.
"""
