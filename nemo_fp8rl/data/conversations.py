"""Conversations with the loss on the assistant's answers: exactly the tokens that the model has to write in use.

An answer begins behind the generation prompt, as an engine's does, and ends with the token that ends the turn: the last
special token that the chat template writes for the message, or the one that it writes before a question that follows.
What is behind that token, often a line break, is context. Turn and context are tokenized apart, as they are in use.

A template may show an earlier answer in another form than the last one; that of Qwen3 leaves out earlier thoughts. Each
answer is learned behind what the model sees in use, so such a conversation becomes several examples.
"""

from typing import Any

from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.data.examples import Example
from nemo_fp8rl.data.records import Record
from nemo_fp8rl.data.tokenizer import PromptTokenizer

MARK = "?"
"""A question's text, which no template writes itself between two messages."""
Part = tuple[list[int], bool]
"""Tokens, and whether the loss is on them."""


class ConversationReader:
    """Makes examples of conversations by the tokenizer's chat template."""

    def __init__(self, tokenizer: PromptTokenizer) -> None:
        self.renderer, self.eos_token_id = tokenizer.renderer, tokenizer.eos_token_id
        added = tokenizer.tokenizer.added_tokens_decoder
        self.special_ids = {*tokenizer.tokenizer.all_special_ids, *(i for i, token in added.items() if token.special)}
        self.turn_ends: set[int] = set()

    def read(self, record: Record) -> list[Example]:
        """Return the examples of a conversation that ends with an answer. `turn_ends` gets the tokens that end turns.

        Raises: UserError, with the line, where the template fails, or writes no token that ends an inner turn
        """
        messages, tools = [*record.messages, record.last_message], record.tools
        examples, parts, shown = [], list[Part](), ""
        for i, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            if not i:
                raise UserError(f"{record.place}: the conversation begins with an answer; write the question before it")
            prompt = self.renderer.render_messages(messages[:i], tools, record.place, add_generation_prompt=True)
            through = self.renderer.render_messages(messages[: i + 1], tools, record.place)
            if not through.startswith(prompt):
                raise UserError(
                    f"{record.place}, message {i + 1}: the chat template ({self.renderer.description}) does not begin "
                    "an answer with its generation prompt, so its tokens cannot be told; give "
                    "policy.tokenizer.chat_template_kwargs, such as enable_thinking, or another chat_template"
                )
            if parts and not prompt.startswith(shown):
                examples.append(_example(parts))
                parts, shown = [], ""
            parts.append((self._tokens(prompt[len(shown) :]), False))
            ids, end = self._tokens(through[len(prompt) :]), ""
            if not self.special_ids & set(ids):
                end = self._end_before_a_question(messages[: i + 1], tools, record.place, through)
                ids += self._tokens(end)
            parts += self._turn(ids, f"{record.place}, message {i + 1}", i == len(messages) - 1)
            shown = through + end
        return [*examples, _example(parts)]

    def _end_before_a_question(
        self, messages: list[dict[str, Any]], tools: list[Any] | None, place: str, through: str
    ) -> str:
        """Return the special token that ends the last answer only where a question follows; "" without one."""
        try:
            text = self.renderer.render_messages([*messages, {"role": "user", "content": MARK}], tools, place)
        except UserError:  # a template that takes no question there; `_turn` says what lacks an end
            return ""
        tail = text.removeprefix(through).partition(MARK)[0] if text.startswith(through) else ""
        first = self.renderer.tokenizer.decode(self._tokens(tail)[:1])
        return first if self.special_ids & set(self._tokens(tail)[:1]) and tail.startswith(first) else ""

    def _turn(self, ids: list[int], where: str, is_last: bool) -> list[Part]:
        """Return the answer with the token that ends it, and what the template writes behind."""
        ends = [position for position, token in enumerate(ids) if token in self.special_ids]
        if not ends:
            if not is_last:
                raise UserError(
                    f"{where}: the chat template writes no special token at the end of an answer, so the model would "
                    "not learn where to stop; give another template in policy.tokenizer.chat_template"
                )
            self.turn_ends.add(self.eos_token_id)
            return [([*ids, self.eos_token_id], True)]
        self.turn_ends.add(ids[ends[-1]])
        return [(ids[: ends[-1] + 1], True), (ids[ends[-1] + 1 :], False)]

    def _tokens(self, text: str) -> list[int]:
        tokens: Any = self.renderer.tokenizer(text, add_special_tokens=False).input_ids
        return list(tokens)


def _example(parts: list[Part]) -> Example:
    """Return the example, without the context behind the last answer."""
    return Example.of_parts(*(parts if parts[-1][1] else parts[:-1]))
