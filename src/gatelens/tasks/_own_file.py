"""A user's own task: a JSON-lines file with `clean`, `corrupt`, `answer`, `wrong`, or with `prompt`, `response`.

`answer` and `wrong` are strings or lists of strings. Each string is one token that follows the prompt directly, so most
begin with a space. `roles` is optional and names the roles of tokens: role -> text in the clean prompt, or [text, which
occurrence of it]. Every line is checked, and a bad line is reported with its number.
"""

import json
import logging
from collections.abc import Callable, Sized
from pathlib import Path
from typing import Any, TypeVar

from gatelens.errors import GatelensError, shortened
from gatelens.runtime.inputs import parse_json
from gatelens.tasks.base import CircuitTask, ResponseTask
from gatelens.tasks.build import examples, from_tokens
from gatelens.tasks.token_roles import Span
from gatelens.tasks.tokens import Pair, Tokenizer, tokenise

CIRCUIT_KEYS = ("clean", "corrupt", "answer", "wrong")
RESPONSE_KEYS = ("prompt", "response")
# An error shows at most this many bad lines, and the number of the others.
SHOWN = 10

Text = TypeVar("Text")
Tokens = TypeVar("Tokens", bound=Sized)
log = logging.getLogger(__name__)


def read(
    tokenizer: Tokenizer,
    path: str,
    n: int | None = None,
    seed: int = 0,
    *,
    skip_bad: bool = False,
    context: int | None = None,
) -> CircuitTask | ResponseTask:
    """Build the task that a file describes.

    Arguments:
        path: the file.
        n: use only the first n good lines. The default is all of them, in their order.
        seed: is stored in the task, but does not change the prompts.
        skip_bad: leave out bad lines with a warning. Without it, a bad line is an error.
        context: the number of tokens that the model can read. A line with more tokens is a bad line.
    """
    lines = _lines(path)
    if not lines:
        raise GatelensError(
            f"{path} has no lines: write one JSON object on each line, with the keys {', '.join(CIRCUIT_KEYS)} or with "
            f"the keys {', '.join(RESPONSE_KEYS)}."
        )
    if _is_response(lines):
        _, tokenised = _good_lines(path, lines, _item, lambda items: examples(tokenizer, items), skip_bad, context)
        return ResponseTask(path, seed, tokenised[:n], tokenizer.pad_token_id or 0, {"skip_bad": skip_bad})
    pairs, tokens = _good_lines(path, lines, _pair, lambda items: tokenise(tokenizer, items), skip_bad, context)
    return from_tokens(path, seed, pairs[:n], tokens[:n], skip_bad=skip_bad)


def _lines(path: str) -> dict[int, str]:
    """Line number, counted from one -> text, for all lines that are not blank."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        raise GatelensError(f"{shortened(path)} cannot be read: {shortened(str(error))}.") from error
    return {number: line for number, line in enumerate(text.split("\n"), 1) if line.strip()}


def _good_lines(
    path: str,
    lines: dict[int, str],
    parse: Callable[[dict[str, Any]], Text],
    tokenise_all: Callable[[list[Text]], tuple[list[Tokens | None], dict[int, str]]],
    skip_bad: bool,
    context: int | None,
) -> tuple[list[Text], list[Tokens]]:
    """All good lines, as text and as tokens. Bad lines are an error, or a warning with `skip_bad`."""
    bad: dict[int, str] = {}
    texts: dict[int, Text] = {}
    for number, line in lines.items():
        try:
            texts[number] = parse(_object(line))
        except ValueError as problem:
            bad[number] = str(problem)
    tokenised, problems = tokenise_all(list(texts.values()))
    good: list[tuple[Text, Tokens]] = []
    for i, (number, tokens) in enumerate(zip(texts, tokenised, strict=True)):
        if tokens is None:
            bad[number] = problems[i]
        elif context is not None and len(tokens) > context:
            bad[number] = f"it has {len(tokens)} tokens, and the model can read {context}"
        else:
            good.append((texts[number], tokens))
    _report(path, len(lines), bad, skip_bad)
    return [text for text, _ in good], [tokens for _, tokens in good]


def _report(path: str, total: int, bad: dict[int, str], skip_bad: bool) -> None:
    """Raise an error that lists the bad lines; with `skip_bad`, log a warning if there are good lines too."""
    if not bad:
        return
    count = f"{len(bad)} of {total} lines {'is' if len(bad) == 1 else 'are'} bad"
    if skip_bad and len(bad) < total:
        log.warning("%s: %s and left out.", path, count)
        return
    shown = "".join(f"\n  line {number}: {shortened(bad[number])}" for number in sorted(bad)[:SHOWN])
    more = f"\n  and {len(bad) - SHOWN} more" if len(bad) > SHOWN else ""
    advice = "correct them" if len(bad) == total else "correct them, or leave them out with skip_bad=True (--skip-bad)"
    raise GatelensError(f"{path}: {count}, so nothing was run; {advice}.{shown}{more}")


def _object(line: str) -> dict[str, Any]:
    """Parse a line that is a JSON object."""
    try:
        value = parse_json(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error.msg} at column {error.colno})") from error
    except ValueError as error:
        raise ValueError(f"not JSON that can be read ({error})") from error
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    if "\\u" in line and not _is_text(value):
        raise ValueError("it has half of a surrogate pair (\\ud800 to \\udfff), which is not text")
    return value


def _is_text(value: Any) -> bool:
    """Whether all texts in a value can be written as UTF-8."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_response(lines: dict[int, str]) -> bool:
    """Whether this is a response task: the first line that has a known key decides."""
    for line in lines.values():
        try:
            keys = set(_object(line))
        except ValueError:
            continue
        if keys & {*CIRCUIT_KEYS, *RESPONSE_KEYS}:
            return bool(keys & set(RESPONSE_KEYS))
    return False


def _pair(value: dict[str, Any]) -> Pair:
    clean, corrupt = (_text(value, key, CIRCUIT_KEYS) for key in ("clean", "corrupt"))
    answers, wrong = (_texts(value, key) for key in ("answer", "wrong"))
    template = value.get("template", "")
    if not isinstance(template, str):
        raise ValueError("'template' must be a text that names the template of the prompt")
    return Pair(clean, corrupt, answers, wrong, _roles(value.get("roles", {}), clean), template)


def _roles(roles: Any, clean: str) -> tuple[Span, ...]:
    """The spans of the words whose roles a line names."""
    if not isinstance(roles, dict):
        raise ValueError('\'roles\' must be an object such as {"subject": "John", "subject again": ["John", 2]}')
    return tuple(_span(role, place, clean) for role, place in roles.items())


def _span(role: str, place: Any, clean: str) -> Span:
    text, number = place if isinstance(place, list) and len(place) == 2 else (place, 1)
    if not (role and isinstance(text, str) and text and type(number) is int and number > 0):
        raise ValueError(f"the role {role!r} must be a text of the clean prompt, or [text, which occurrence of it]")
    start = -1
    for _ in range(min(number, len(clean) + 1)):
        start = clean.find(text, start + 1)
        if start < 0:
            raise ValueError(f"the role {role!r} is occurrence {number} of {text!r}, which {clean!r} does not have")
    return Span(role, start, start + len(text))


def _item(value: dict[str, Any]) -> tuple[str, str]:
    prompt, response = (_text(value, key, RESPONSE_KEYS) for key in RESPONSE_KEYS)
    return prompt, response


def _text(value: dict[str, Any], key: str, keys: tuple[str, ...]) -> str:
    if key not in value:
        raise ValueError(f"no key {key!r}: a line has the keys {', '.join(keys)}")
    text = value[key]
    if not isinstance(text, str) or not text:
        raise ValueError(f"{key!r} must be a string that is not empty")
    return text


def _texts(value: dict[str, Any], key: str) -> tuple[str, ...]:
    """The strings under a key that holds one string or a list of strings."""
    if not isinstance(value.get(key), list):
        return (_text(value, key, CIRCUIT_KEYS),)
    texts = value[key]
    if not texts or not all(isinstance(text, str) and text for text in texts):
        raise ValueError(f"{key!r} must be a string or a list of strings that are not empty")
    return tuple(texts)
