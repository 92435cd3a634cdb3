"""A conversation that grows by appending tokens, so that the prefix cache finds all of it at the next turn."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pagedec.errors import InvalidArgument
from pagedec.inputs import Array
from pagedec.text.chat_template import Message, Tool, check_messages, render_chat
from pagedec.text.encoding import ids_of
from pagedec.text.harmony import read_answer
from pagedec.text.tokenizer import Tokenizer


class Conversation:
    """Messages of one chat, and the tokens that stand for them.

    `ask` gives the prompt of the next answer, `answer` takes what was generated. An answer's tokens are kept as they
    were generated: encoding its text again may give others. Where the template rewrites what was said before (some drop
    thoughts), they are kept up to the last special token before the change, and the rest is encoded anew. A prompt that
    certainly has more than `max_tokens` tokens is refused before it is tokenised.

        token_ids = conversation.ask("Why?")
        [output] = llm.generate({"prompt_token_ids": token_ids}, params)
        text = conversation.answer(output.outputs[0].token_ids)
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        messages: Sequence[Message] = (),
        *,
        chat_template: str | None = None,
        tools: Sequence[Tool] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        max_tokens: int | None = None,
    ) -> None:
        self.tokenizer, self._max_tokens = tokenizer, max_tokens
        self.messages: list[dict[str, Any]] = check_messages(messages) if messages else []
        self._options: dict[str, Any] = {
            "chat_template": chat_template, "tools": tools, "template_kwargs": template_kwargs
        }  # fmt: skip
        self._known: list[tuple[str, list[int]]] = []
        """Beginnings of the next prompt, as text and as tokens, the longest first."""
        self._open = False
        """A prompt was given out that has no answer yet."""

    @property
    def prompt_ids(self) -> list[int]:
        """The tokens that `ask` has given last, with the answer's behind them once there is one."""
        return list(self._known[0][1]) if self._known else []

    def ask(self, content: str | Sequence[Mapping[str, Any]] | Message) -> list[int]:
        """Add a message (a text is the user's) and return the token ids to generate an answer from.

        Raises `InvalidArgument` as `render_chat` does; the conversation is then as before.
        """
        message = content if isinstance(content, Mapping) else {"role": "user", "content": content}
        [checked] = check_messages([message])
        prompt = render_chat(self.tokenizer, [*self.messages, checked], **self._options)
        token_ids = self._encode(prompt)
        self.messages.append(checked)
        self._known = [(prompt, token_ids), *self._known]
        self._open = True
        return list(token_ids)

    def answer(self, token_ids: Iterable[int] | Array, text: str | None = None) -> str:
        """Add the answer to the last prompt, and return its text (without the space that some vocabularies write
        first); of gpt-oss what the user is told. Its thoughts, and what it calls, are in the last of `messages`, as
        `reasoning_content` and `tool_calls`.

        `token_ids` are all that was generated, an end token included if there is one. `text`: what the answer is to be
        called in the messages, if not the text of its tokens.
        """
        if not self._open:
            raise InvalidArgument("answer", text, "must follow a prompt: call ask first")
        generated = ids_of(token_ids)
        prompt, prompt_ids = self._known[0]
        ended = bool(generated) and generated[-1] in self.tokenizer.eos_token_ids
        said = generated[:-1] if ended else generated
        written = self._text(said, skip_special_tokens=False, keep_leading_space=True)
        shown = self._shown(said) if text is None else text
        known = []
        for spelling in dict.fromkeys((written, self._text(said, skip_special_tokens=False))):
            if ended:  # a template ends a turn with this token, or with one of its own
                end = self.tokenizer.token_bytes(generated[-1]).decode("utf-8", "replace")
                known.append((prompt + spelling + end, [*prompt_ids, *generated]))
            known.append((prompt + spelling, [*prompt_ids, *said]))
        known.sort(key=lambda entry: -len(entry[0]))
        self._known = [*known, (prompt, prompt_ids)]
        parts = read_answer(self.tokenizer, said, ended) if text is None else None
        self.messages.append({"role": "assistant", **(parts or {"content": shown})})
        self._open = False
        return self.messages[-1]["content"]

    def fork(self) -> Conversation:
        """Return a second one that goes on from the same state."""
        other = Conversation(self.tokenizer, max_tokens=self._max_tokens)
        other.messages, other._options = list(self.messages), self._options
        other._known, other._open = list(self._known), self._open
        return other

    def retract(self) -> None:
        """Take back the last message if it has no answer."""
        if self._open:
            self.messages.pop()
            self._known.pop(0)
            self._open = False

    def _shown(self, token_ids: list[int]) -> str:
        return self._text(token_ids, skip_special_tokens=True)

    def _text(self, token_ids: list[int], skip_special_tokens: bool, keep_leading_space: bool = False) -> str:
        detokenizer = self.tokenizer.detokenizer(skip_special_tokens, keep_leading_space)
        return detokenizer.push(token_ids) + detokenizer.finish()

    def _encode(self, prompt: str) -> list[int]:
        if self._max_tokens is not None:
            self.tokenizer.check_length(prompt, self._max_tokens, "messages")
        for text, token_ids in self._known:
            if prompt.startswith(text):
                begun, left = self._further(token_ids, prompt[len(text) :])
                rest = encode_behind(self.tokenizer, begun, left)
                if rest is not None:
                    return [*begun, *rest]
        return self.tokenizer.encode(prompt, add_special_tokens=False)

    def _further(self, token_ids: list[int], rest: str) -> tuple[list[int], str]:
        """What is known goes on behind `token_ids`: take along what `rest` begins with, up to a special token. Returns
        the tokens, and the rest behind them."""
        table, longest = self.tokenizer.byte_table, self._known[0][1]
        data, length, end, taken = rest.encode("utf-8"), len(token_ids), 0, 0
        if longest[:length] != token_ids:
            return token_ids, rest
        for i in range(length, len(longest)):
            piece = table.token_bytes(longest[i])
            if not data.startswith(piece, end):
                break
            end += len(piece)
            if longest[i] in table.special_ids:
                length, taken = i + 1, end
        return longest[:length], data[taken:].decode("utf-8")


def encode_behind(tokenizer: Tokenizer, token_ids: Sequence[int], rest: str) -> list[int] | None:
    """The tokens of `rest`, as they would be behind `token_ids`. None where that depends on more than the last
    token."""
    if not token_ids:
        return None
    table, last = tokenizer.byte_table, token_ids[-1]
    if last in table.special_ids:  # nothing merges across it, but the word behind it may be written in a way of its own
        both = table.token_bytes(last).decode("utf-8", "replace") + rest
        found = tokenizer.encode(both, add_special_tokens=False)
        return found[1:] if found[:1] == [last] else None
    found = tokenizer.encode(rest, add_special_tokens=False)
    return found if table.join(found, skip_special_tokens=False) == rest.encode("utf-8") else None
