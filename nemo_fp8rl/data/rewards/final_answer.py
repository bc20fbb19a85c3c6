r"""Finds the final answer in a completion of a reasoning model.

    <think> ... </think>   a closed block is left out; what follows an open one is not an answer yet
    \boxed{...}            the last one counts, or the last ones where only "and", "or" or a comma stands between them
    #### 72                GSM8K's mark: what follows the last one, on its line
    Answer: Paris          what follows the last such word, on its line; also "the answer is"

Only text is handled here; `verifiers` compares.
"""

import re

THINK = re.compile(r"<(think|thinking)>.*?</\1>", re.DOTALL)
OPEN_THINK, CLOSE_THINK = re.compile(r"<(?:think|thinking)>"), re.compile(r"</(?:think|thinking)>")
BOXED = re.compile(r"\\(?:boxed|fbox)\s*\{")
BETWEEN_BOXES = re.compile(r"[\s,$]*(?:and|or)?[\s,$]*")
MARK = "####"
ANSWER_WORD = re.compile(r"\banswer(?:\s+to\b[^.:\n]{0,80}?)?[\s*_]*(?::|\bis\b)[\s:*_]*", re.IGNORECASE)
SENTENCE_END = re.compile(r"[.!?]\s|\n")
EMPHASIS = "*_`\"'$ \t\r\n"
WORD = re.compile(r"[^\W\d_]{3,}")


def after_thinking(text: str) -> str:
    """Return the text without closed think blocks and without what follows an open one.

    A template may have opened the block in the prompt, so a closing tag ends whatever stands before it.
    """
    text = THINK.sub("", text)
    if close := list(CLOSE_THINK.finditer(text)):
        text = text[close[-1].end() :]
    if still_open := OPEN_THINK.search(text):
        text = text[: still_open.start()]
    return text


def boxes(text: str) -> list[tuple[int, int, str]]:
    """Return (start, end, content) of each \\boxed{...} whose braces are closed."""
    found = []
    position = 0
    while match := BOXED.search(text, position):
        position, depth = match.end(), 1
        while position < len(text) and depth:
            if text[position] == "\\":
                position += 1
            else:
                depth += {"{": 1, "}": -1}.get(text[position], 0)
            position += 1
        if depth == 0:
            found.append((match.start(), position, text[match.end() : position - 1]))
        else:
            position = match.end()
    return found


def last_boxes(text: str) -> str:
    """Return the last \\boxed{...}, with those directly before it; "" without one."""
    found = boxes(text)
    if not found:
        return ""
    first = len(found) - 1
    while first and BETWEEN_BOXES.fullmatch(text[found[first - 1][1] : found[first][0]]):
        first -= 1
    return ", ".join(f"\\boxed{{{content}}}" for *_, content in found[first:])


def final_part(text: str) -> str:
    """Return the part of a completion that math-verify reads: the last boxes, the result behind ####, else all."""
    text = after_thinking(text)
    if boxed := last_boxes(text):
        return boxed
    return marked_result(text) or text


def marked_result(text: str) -> str:
    """Return what follows the last #### on its line; "" without one."""
    if MARK not in text:
        return ""
    lines = text.rpartition(MARK)[2].strip().splitlines()
    return lines[0].strip() if lines else ""


def final_words(text: str) -> str:
    """Return the final answer as plain words, for answers that are no mathematics; "" without one."""
    text = after_thinking(text)
    if found := boxes(text):
        return plain_words(re.sub(r"\\(?:text|textbf|mathrm|mathbf)\s*\{([^{}]*)\}", r"\1", found[-1][2]))
    if MARK in text:
        return plain_words(marked_result(text))
    if phrases := list(ANSWER_WORD.finditer(text)):
        return plain_words(SENTENCE_END.split(text[phrases[-1].end() :], maxsplit=1)[0])
    return plain_words(text)


def plain_words(text: str) -> str:
    """Return the text without emphasis, quotes and a full stop; case is ignored in words of three letters or more."""
    words = " ".join(text.split()).strip(EMPHASIS).rstrip(".!").strip(EMPHASIS)
    return words.casefold() if WORD.search(words) and not re.search(r"[\\^={}]", words) else words


def is_words(text: str) -> bool:
    """Return whether plain words are language: letters and spaces, with a word of three letters or more."""
    return bool(WORD.search(text)) and all(character.isalpha() or character in " -'," for character in text)


def choice_of(words: str) -> str:
    """Return the letter of a choice, A of "(A)", "A)" and "A. Paris"; else the words."""
    match = re.fullmatch(r"\(?([A-Za-z])[).:](?:\s.*)?", words, re.DOTALL)
    return match[1].upper() if match else words
