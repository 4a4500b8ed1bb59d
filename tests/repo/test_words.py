"""The project's texts are in plain English: none of them has one of these words."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# The word, as a pattern, and what to write instead.
PLAIN = {
    r"anew": "again",
    r"mend(s|ed|ing)?": "fix, repair",
    r"who(m)?ever": "the one who …: name it",
    r"such a one|such as is": "name it",
    r"(comes?|came) to be": "is made, starts",
    r"of no use": "unusable",
    r"hence|thus|thereby|whereby|thereof|therein": "so",
    r"for want of": "without",
    r"lest": "so that … not",
    r"whilst": "while",
    r"(is|are) to [a-z]+": "will, must, should, or the active voice",
    r"hears?|heard": "receives, is told",
    r"holds? up|held up": "delays",
    r"in vain": "without success",
    r"without a word": "silently, without notice",
    r"as ever": "as before",
    r"by lot": "at random",
    r"gravest": "most serious",
    r"what becomes of|comes? of it": "name the result",
    r"nevertheless": "but, anyway",
    r"upon": "on, when",
    r"so as to": "to",
    r"betak\w+": "go",
    r"at hand": "here, ready",
    r"by itself alone": "alone",
    r"the same goes": "also",
    r"makes good": "replaces",
    r"holds? \w+( \w+){0,4} off": "delays",
}
FOUND = re.compile("|".join(rf"\b(?:{word})\b" for word in PLAIN), re.IGNORECASE)
TEXTS = (".py", ".md", ".yaml", ".toml", ".sh", ".service", "Makefile", "run")


def hits(text: str) -> list[tuple[int, str]]:
    """Line numbers and banned words."""
    return [(number, hit[0]) for number, line in enumerate(text.splitlines(), 1) for hit in FOUND.finditer(line)]


def test_texts_are_in_plain_english() -> None:
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not in a git checkout")
    names = [name for name in listed.stdout.splitlines() if name.endswith(TEXTS) and name != "tests/repo/test_words.py"]
    found = [
        f"{name}:{number}: {word}: write {_instead(word)}"
        for name in names
        if (ROOT / name).is_file()
        for number, word in hits((ROOT / name).read_text())
    ]
    assert names
    assert found == []


def _instead(word: str) -> str:
    return next(plain for pattern, plain in PLAIN.items() if re.fullmatch(pattern, word, re.IGNORECASE))


@pytest.mark.parametrize("text", ["it is made anew", "Whoever asks", "that holds the next try off", "of no use"])
def test_a_banned_word_is_found(text: str) -> None:
    assert hits(f"first line\n{text}\n")[0][0] == 2


@pytest.mark.parametrize("text", ["menders", "the latest", "mend-free"[5:], "use it", "turn it off"])
def test_a_plain_word_is_not(text: str) -> None:
    assert hits(text) == []
