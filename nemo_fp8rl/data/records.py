"""One sample of a dataset: the forms of prompts and answers that are read, and what is refused.

    prompt    text, or a conversation: a list of role and content, or of from and value (ShareGPT)
    answer    text, a number (its text counts), or a list of accepted answers; the user's function takes any value

A value that could mean two things is refused with its line, and nothing is guessed: other fields are named by
`input_key` and `output_key`.
"""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from nemo_fp8rl.common.errors import UserError

TEXT_FIELD = "text"
"""Field of a document where no `input_key` is given."""
PROMPT_FIELDS = ("prompt", "messages", "conversations")
"""Fields that are looked for where no `input_key` is given; a line has one of them."""
ANSWER_FIELD = "answer"
SOLUTION_FIELD = "solution"
SHAREGPT_ROLES = {
    **{"human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "assistant": "assistant"},
    **{"model": "assistant", "system": "system", "tool": "tool", "observation": "tool"},
}
LONGEST = 60
"""Characters of a value in a message."""


@dataclass(frozen=True)
class FieldNames:
    """The names of the fields that hold prompt and answer.

    block:       the recipe's block of the dataset, for messages
    input_key:   field of the prompt, a.b for one within an object; None looks for PROMPT_FIELDS
    output_key:  field of the answer; None is ANSWER_FIELD, or the last message of a conversation
    any_answer:  an answer may have any JSON type or be missing: its reader decides
    is_text:     records are documents, without answers
    solution:    field of the reference solution; "" reads none
    """

    block: str = "data.train"
    input_key: str | None = None
    output_key: str | None = None
    any_answer: bool = False
    is_text: bool = False
    solution: str = ""


@dataclass(frozen=True)
class Record:
    """One sample.

    prompt:         the question as text; of a conversation of several messages, each below its role
    answer:         the first accepted answer as text; "" where the dataset has none
    other_answers:  further accepted answers
    chat:           JSON of a conversation's messages and tools, for the chat template, and of the assistant's message
                    that ends it, if one does; "" for a prompt that is text
    fields:         all fields of the line, and its `prompt` and `answer`
    place:          file and line
    solution:       a reference solution as text; "" where the line has none, or none is read
    """

    prompt: str
    answer: str
    other_answers: tuple[str, ...] = ()
    chat: str = ""
    fields: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)
    place: str = field(default="", compare=False)
    solution: str = ""

    @property
    def question(self) -> tuple[str, str]:
        """The key of equal questions: the prompt, and the tools of a conversation."""
        return self.prompt, json.dumps(self.tools) if self.tools else ""

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The messages for a chat template."""
        return json.loads(self.chat)["messages"] if self.chat else [{"role": "user", "content": self.prompt}]

    @property
    def last_message(self) -> dict[str, Any]:
        """The assistant's message that answers the prompt."""
        message = json.loads(self.chat).get("answer") if self.chat else None
        return message or {"role": "assistant", "content": self.answer}

    @property
    def tools(self) -> list[Any] | None:
        return json.loads(self.chat)["tools"] if self.chat else None


def parse_records(rows: Iterable[tuple[str, Any]], names: FieldNames) -> list[Record]:
    """Return the records of (place, row) pairs, in order. Raises UserError, with the place."""
    return [parse_record(row, place, names) for place, row in rows]


def parse_record(row: Any, place: str, names: FieldNames) -> Record:
    """Return the record of one row. Raises UserError, with the place, for a row that cannot mean one thing."""
    if not isinstance(row, Mapping):
        raise UserError(f'{place}: not an object; write {{"prompt": ..., "answer": ...}}')
    if names.is_text:
        return _parse_document(row, place, names)
    key = _prompt_field(row, place, names)
    chat, answer_of_chat, last = "", None, {}
    value, tools = _lookup(row, key), _parse_tools(row.get("tools"), place)
    if isinstance(value, list):
        messages = parse_messages(value, f'{place}: "{key}"')
        if messages[-1]["role"] == "assistant":
            *messages, last = messages
            answer_of_chat = last.get("content")
        text = describe_messages(messages)
        if not messages or not str(messages[-1].get("content") or "").strip():
            raise UserError(f'{place}: "{key}" has no text before the answer; remove the line or write the question')
        parts = {"messages": messages, "tools": tools} | ({"answer": last} if last else {})
        chat = json.dumps(parts, ensure_ascii=False, default=str)
        prompt: Any = messages
    elif isinstance(value, str):
        prompt = text = value
        if not text.strip():
            raise UserError(f'{place}: "{key}" is blank; remove the line or write the question')
        if tools:
            chat = json.dumps({"messages": [{"role": "user", "content": text}], "tools": tools}, ensure_ascii=False)
    else:
        raise UserError(
            f'{place}: "{key}" is {short_json(value)}, which is no text; give it as a string, or as a list of messages '
            "with role and content"
        )
    answer = _find_answer(row, place, names, answer_of_chat)
    answers = _accepted_answers(answer, place, names)
    solution = _find_solution(row, place, names)
    for part in (text, chat, *answers, solution):
        _check_characters(part, f'{place}: "{key}" or its answer')
    fields = {**row, "prompt": prompt, "answer": answer}
    return Record(text, answers[0], answers[1:], chat, fields, place, solution)


def _parse_document(row: Mapping[str, Any], place: str, names: FieldNames) -> Record:
    key = names.input_key or TEXT_FIELD
    text = _lookup(row, key)
    if text is None:
        fix = "give the documents there" if names.input_key else f"set {names.block}.input_key to the field of the text"
        raise UserError(f'{place}: "{key}" is missing, and {names.block} has documents; {_known(row)}: {fix}')
    if not isinstance(text, str) or not text.strip():
        raise UserError(f'{place}: "{key}" is {short_json(text)}, which is no text; remove the line or write the text')
    _check_characters(text, f'{place}: "{key}"')
    return Record(text, "", fields=row, place=place)


def _check_characters(text: str, where: str) -> None:
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise UserError(f"{where} holds half a surrogate pair; write the whole character")


def parse_messages(value: list[Any], where: str) -> list[dict[str, Any]]:
    """Return messages with role and content, from those or from ShareGPT's from and value. Raises UserError."""
    if not value:
        raise UserError(f"{where} is an empty list; write messages with role and content")
    return [_parse_message(message, f"{where}, message {number}") for number, message in enumerate(value, 1)]


def describe_messages(messages: list[dict[str, Any]]) -> str:
    """Return a conversation as text: a single user's message as it is, several each below its role."""
    if len(messages) == 1 and messages[0]["role"] == "user":
        return _content_text(messages[0])
    return "\n".join(f"[{message['role']}]\n{_content_text(message)}" for message in messages)


def answer_text(answer: Any, where: str) -> tuple[str, ...]:
    """Return the accepted answers as text.

    A number counts as its text (72, 1.5), a list as several accepted answers.
    Raises: UserError for a blank answer, and for true, false, null and objects, which have no text that a model writes
    """
    if isinstance(answer, list | tuple):
        if not answer:
            raise UserError(f"{where} is an empty list; give the accepted answers")
        return tuple(dict.fromkeys(_scalar_text(entry, where) for entry in answer))
    return (_scalar_text(answer, where),)


def short_json(value: Any) -> str:
    """Return the value as JSON, cut off where it is long; for messages."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        text = f"a {type(value).__name__}"
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."


def _prompt_field(row: Mapping[str, Any], place: str, names: FieldNames) -> str:
    """Return the name of the field that holds the prompt. Raises UserError where it is not clear."""
    if (key := names.input_key) is not None:
        if _lookup(row, key) is None:
            raise UserError(f'{place}: "{key}" ({names.block}.input_key) is missing; {_known(row)}')
        return key
    present = [name for name in PROMPT_FIELDS if row.get(name) is not None]
    if len(present) == 1:
        return present[0]
    if present:
        raise UserError(
            f"{place}: {' and '.join(present)} are both there; set {names.block}.input_key to the one with the prompt"
        )
    raise UserError(
        f'{place}: "prompt" is missing; {_known(row)}: set {names.block}.input_key and output_key to the fields of '
        "prompt and answer"
    )


def _lookup(row: Mapping[str, Any], key: str) -> Any:
    """Return the value of a field, or of a field within objects (reward_model.ground_truth); None without one."""
    if key in row:
        return row[key]
    value: Any = row
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _find_answer(row: Mapping[str, Any], place: str, names: FieldNames, answer_of_chat: Any) -> Any:
    """Return the answer as the dataset has it, None without one. Raises UserError where there are two."""
    key = names.output_key or ANSWER_FIELD
    answer = _lookup(row, key)
    if answer is not None and answer_of_chat is not None:
        raise UserError(
            f'{place}: the conversation ends with an assistant\'s message and "{key}" gives an answer as well; remove '
            "one of them"
        )
    if answer is not None or answer_of_chat is not None or names.any_answer:
        return answer_of_chat if answer is None else answer
    if names.output_key is not None:
        raise UserError(f'{place}: "{key}" ({names.block}.output_key) is missing; {_known(row)}')
    raise UserError(
        f'{place}: "{key}" is missing or null; {_known(row)}: set {names.block}.output_key to the field of the answer'
    )


def _find_solution(row: Mapping[str, Any], place: str, names: FieldNames) -> str:
    """Return the reference solution, "" without one. Raises UserError for a value that is no text."""
    solution = _lookup(row, names.solution) if names.solution else None
    if solution is None:
        return ""
    if not isinstance(solution, str):
        raise UserError(
            f'{place}: "{names.solution}" is {short_json(solution)}, which is no text; write the solution as a string, '
            f"or set {names.block}.solution_key to another field"
        )
    return solution if solution.strip() else ""


def _accepted_answers(answer: Any, place: str, names: FieldNames) -> tuple[str, ...]:
    where = f'{place}: "{names.output_key or ANSWER_FIELD}"'
    if not names.any_answer:
        return answer_text(answer, where)
    try:
        return answer_text(answer, where)
    except UserError:  # only the user's function reads it
        return ("",)


def _scalar_text(value: Any, where: str) -> str:
    if isinstance(value, str):
        if not value.strip():
            raise UserError(f"{where} is blank, and would reward an empty answer; remove the line or write the answer")
        return value
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return repr(value)
    raise UserError(
        f"{where} is {short_json(value)}, which is not text; give the text that a right answer has, a number, or a "
        "list of these"
    )


def _parse_message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise UserError(f"{where} is {short_json(message)}; write an object with role and content")
    if "role" not in message and "from" in message:
        sender = message["from"]
        role = SHAREGPT_ROLES.get(sender) if isinstance(sender, str) else None
        if role is None:
            known = ", ".join(SHAREGPT_ROLES)
            raise UserError(
                f'{where}: "from" is {short_json(sender)}, which is none of {known}; write role and content'
            )
        message = {"role": role, "content": message.get("value")}
    fields = {name: value for name, value in message.items() if value is not None}  # a table has nulls for absent ones
    role, content = fields.get("role"), fields.get("content")
    if not isinstance(role, str) or not role.strip():
        raise UserError(f'{where}: "role" is missing or not text; write system, user, assistant or tool')
    if isinstance(content, list):
        for part in content:
            if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                raise UserError(f"{where}: the content has {short_json(part)}, and only parts of text are read")
        fields["content"] = "".join(part["text"] for part in content)
    elif content is None and not fields.get("tool_calls"):
        raise UserError(f'{where}: "content" is missing; write the text of the message')
    elif content is not None and not isinstance(content, str):
        raise UserError(f'{where}: "content" is {short_json(content)}; give it as a string')
    return fields


def _parse_tools(tools: Any, place: str) -> list[Any] | None:
    """Return the tools of a conversation; tables often have them as JSON in a text."""
    if isinstance(tools, str) and tools.strip():
        try:
            tools = json.loads(tools)
        except (ValueError, RecursionError):
            tools = False
    if tools is None or tools in ("", []):
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise UserError(f'{place}: "tools" must be a list of objects, JSON schemas of functions')
    return tools


def _content_text(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    return content if isinstance(content, str) else json.dumps(message.get("tool_calls"), ensure_ascii=False)


def _known(row: Mapping[str, Any]) -> str:
    names = [str(name) for name in row]
    return f"the line has {', '.join(names[:12])}{', ...' * (len(names) > 12)}" if names else "the line has no field"
