"""Text in and out: the tokenizer, the bytes of its tokens, and text that grows token by token."""
