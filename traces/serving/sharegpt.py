"""ShareGPT conversations of a JSON file, through the Hugging Face `datasets` library.

The layout is that of the public file, [{"id", "conversations": [{"from", "value"}]}], or that of
OpenAI's chats, {"messages": [{"role", "content"}]}, whose user is the human and whose assistant the
gpt; as .json, .jsonl or either with .gz. Every row becomes a Conversation or a fault.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from traces.files import absent
from traces.plain_json import is_beyond_datasets, plain_rows
from traces.records import NOT_JSON, is_unicode
from traces.tables import opened_dataset

# The longest message of ShareGPT_V3 has 241,402 Llama-2 tokens, about a million characters. A
# longer text is no chat message, and tokenizing it could exhaust the memory.
MAX_MESSAGE_CHARS = 4_000_000
LAYOUTS = {"conversations": ("from", "value"), "messages": ("role", "content")}
ROLES = {"user": "human", "assistant": "gpt"}  # of OpenAI's chats; others keep their names


@dataclass(frozen=True, slots=True)
class Conversation:
    """One row, counted from 1: roles and texts of its messages in order, as in the file."""

    row: int
    conversation_id: str
    roles: tuple[str, ...]
    texts: tuple[str, ...]


@dataclass(frozen=True)
class ShareGPT:
    """The rows of a file: conversations, and the faults of all other rows by row number."""

    conversations: list[Conversation]
    faults: dict[int, str]

    @property
    def rows_read(self) -> int:
        """Number of rows of the file."""
        return len(self.conversations) + len(self.faults)

    @property
    def dropped(self) -> Counter[str]:
        """Number of rows that are no conversation, by reason."""
        return Counter(self.faults.values())


def read_sharegpt(path: str | Path, max_message_chars: int = MAX_MESSAGE_CHARS) -> ShareGPT:
    """The checked rows of a file. Raises ValueError where the file as a whole is unreadable."""
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"{path}: {absent(path)}; give a ShareGPT .json, .jsonl or .json.gz")
    rows = read_rows(path)
    if not rows:
        raise ValueError(f"{path}: it holds no conversation; expected a list of them")
    return checked_rows(rows, max_message_chars)


def read_rows(path: Path) -> Sequence[Any]:
    """The rows as Python objects, through `datasets` where that is exact, else as plain JSON.

    `datasets` types whole columns. It stops at a row that is no object and at a malformed line, and
    it makes dates of texts that all look like dates. See also is_beyond_datasets.
    """
    rows = None if is_beyond_datasets(path) else _through_datasets(path)
    return plain_rows(path) if rows is None else rows


def checked_rows(rows: Iterable[Any], max_message_chars: int = MAX_MESSAGE_CHARS) -> ShareGPT:
    """Each row as a Conversation, or with the reason why it is none."""
    conversations, faults = list[Conversation](), dict[int, str]()
    for number, row in enumerate(rows, 1):
        checked = _checked(number, row, max_message_chars)
        if isinstance(checked, str):
            faults[number] = checked
        else:
            conversations.append(checked)
    return ShareGPT(conversations, faults)


def _checked(number: int, row: Any, max_message_chars: int) -> Conversation | str:
    if row is NOT_JSON:
        return "line is not JSON"
    if not isinstance(row, dict):
        return "row is not an object"
    layout = next((name for name in LAYOUTS if row.get(name) is not None), None)
    if layout is None:
        return "no conversations field"
    messages, (who, what) = row[layout], LAYOUTS[layout]
    if not isinstance(messages, list):
        return f"{layout} is not a list"
    for message in messages:
        reason = _fault(message, max_message_chars, who, what)
        if reason:
            return reason
    return Conversation(
        number,
        str(row.get("id", "")),
        tuple(_role(message[who], layout) for message in messages),
        tuple(message[what] for message in messages),
    )


def _role(name: str, layout: str) -> str:
    return ROLES.get(name, name) if layout == "messages" else name


def _fault(message: Any, max_message_chars: int, who: str, what: str) -> str | None:
    if not isinstance(message, dict):
        return "message is not an object"
    for name in (who, what):
        if message.get(name) is None:
            return f"message without {name}"
        if not isinstance(message[name], str):
            return f"message {name} is not text"
    if len(message[what]) > max_message_chars:
        return f"message longer than {max_message_chars} characters"
    if not is_unicode(message[what]):
        return f"message {what} is not valid Unicode"
    return None


def _through_datasets(path: Path) -> Sequence[Any] | None:
    """The rows, or None where `datasets` fails on the file or would change its values."""
    try:
        with opened_dataset("json", path) as loaded:
            return list(loaded) if _is_faithful(loaded.features) else None
    except Exception:  # errors of typing have many types; plain_rows names the place
        return None


def _is_faithful(features: Any) -> bool:
    """Whether texts stayed texts and did not become dates."""
    conversations = features.get("conversations")
    if type(conversations).__name__ == "Json":
        return True
    messages = getattr(conversations, "feature", None)
    if not isinstance(messages, dict):
        return False
    return all(getattr(messages.get(name), "dtype", "") == "string" for name in ("from", "value"))
