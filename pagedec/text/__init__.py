"""Text in and out: the tokenizer, the bytes of its tokens, text that grows token by token, and prompts of chats.

Read in this order:

- `byte_table`: the bytes that each token stands for. `tokenizer`: a vocabulary with its rules; `encoding` is what
  calling it gives.
- `detokenizer`, `streaming`: tokens to text as they come; the second ends at stop strings too.
- `token_bound`: what is certainly too long is refused before it is tokenised.
- `budget`, `bounded_template`, `compiled_template`: templates that may not take for ever. `template_probe`: what one
  expects of messages; `chat_template`: messages to a prompt.
- `conversation`: a chat whose prompts grow by appending tokens. `harmony`: the parts of gpt-oss' answers.
- `json_lines`: records as every reader of JSON takes them.

The tokenizer of a GGUF file is made in formats/gguf/; only what is ours of it is here.
"""
