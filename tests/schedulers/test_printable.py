"""No escape of a program's, a host's or a server's reaches the terminal."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from urllib.parse import quote, quote_plus

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schedulers.node.redaction import redact
from schedulers.printable import one_line, printable, without_password

HARMFUL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("ValueError: no such luck", "ValueError: no such luck"),
        ("é… 日本 \U0001f600\n\tindented", "é… 日本 \U0001f600\n\tindented"),
        ("\x1b[1;31mValueError\x1b[0m: x", "ValueError: x"),
        ("a\x1b[2J\x1b[1;1Hb\x9b31mc", "abc"),  # clear, move; C1's form
        ("a\x1b]0;title\x07b\x1b]52;c;ZXZpbA==\x1b\\c\x9d0;t\x9cd", "abcd"),  # the title; the clipboard
        ("a\x1bP1$r0m\x1b\\b\x1b^x\x1b\\c\x1b_y\x1b\\d", "abcd"),
        ("a\x1b(0b\x1bcd\x1b7e", "abde"),  # the character set, the reset, the cursor
        ("a\x1b]0;without end", "a\\x1b]0;without end"),
        ("half\x1b[", "half\\x1b["),
        ("progress 10%\rprogress 99%", "progress 10%\\x0dprogress 99%"),
        ("one\r\ntwo", "one\ntwo"),
        ("bell\x07 back\x08 nul\x00 del\x7f c1\x85", "bell\\x07 back\\x08 nul\\x00 del\\x7f c1\\x85"),
        ("a\u202eb\u2066c\u2028d", "a\\u202eb\\u2066c\\u2028d"),
        ("a\u200eb\u200fc\u061cd", "a\\u200eb\\u200fc\\u061cd"),  # the marks of direction without an embedding
        ("raw bytes \udcff", "raw bytes \udcff"),  # as the command line has them; whoever prints escapes them
    ],
)
def test_escapes_go_and_other_control_characters_are_shown(text: str, shown: str) -> None:
    assert printable(text) == shown
    assert one_line(text) == shown.replace("\n", " ")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://host/path", "https://host/path"),
        ("https://me:secret@host:5000/path@v1", "https://host:5000/path@v1"),
        ("https://hf_token@host", "https://host"),
        ("https://me:p@ss@host/x", "https://host/x"),
        ("https://me:p/ss@host/x", "https://host/x"),
        ("https://me:p/s@s@host/x", "https://host/x"),
        ("https://[::1]:80/a@b", "https://[::1]:80/a@b"),
        ("https://[::1]/a@b", "https://[::1]/a@b"),
        ("https://me:secret@[::1]:80/a@b", "https://[::1]:80/a@b"),
        # A host, its port and a path; or a user and a password: only what both readings allow is shown.
        ("https://host:8080/path@v1", "https://host:…@v1"),
        ("https://host.example:5000/a@b", "https://host.example:…@b"),
        ("https://localhost:80/a@b?c@d", "https://localhost:…@d"),
        ("http://first.last:12/3@h", "http://first.last:…@h"),
        ("http://u:12/3@h:80/x", "http://u:…@h:80/x"),
        ("http://u:12?3#4@h", "http://u:…@h"),
        ("http://u:/3@h", "http://u:…@h"),
        ("https://host.example:5000/a", "https://host.example:5000/a"),
        ("-r https://a:b@one/x https://c:d@two", "-r https://one/x https://two"),
        ("git@host:team/train.git", "git@host:team/train.git"),
        ("someone@example.org", "someone@example.org"),
    ],
)
def test_a_url_is_shown_without_user_and_password(text: str, shown: str) -> None:
    assert without_password(text) == shown


def test_the_values_of_secrets_are_replaced_by_their_names() -> None:
    secrets = {
        "TOKEN": "hf_s3cret",
        "LONGER": "hf_s3cret_2",
        "KEY": "first line\nsecond\\line",
        "PIN": "123",
        "NONE": "",
    }
    text = "hf_s3cret, hf_s3cret_2; 'first line' then 'second\\\\line' and first line\nsecond\\line; 123"
    shown = "(secret TOKEN), (secret LONGER); '(secret KEY)' then '(secret KEY)' and (secret KEY); 123"
    assert redact(text, secrets) == shown
    assert redact("plain", {}) == "plain"


@pytest.mark.parametrize(
    "value", ["p/w+1 & é", 'it\'s "q" $HOME\\x', "a\nb\tc d", "\U0001f600 4711", "été%2F?=", "Zm9v+/=="]
)
@pytest.mark.parametrize(
    "escape",
    [
        str,
        repr,
        json.dumps,
        lambda value: json.dumps(value, ensure_ascii=False),
        lambda value: json.dumps(value).replace("/", r"\/").replace("&", r"\u0026"),
        shlex.quote,
        lambda value: f"'{value}'".replace("'", "'\\''"),
        lambda value: re.sub(r'(["$`\\])', r"\\\1", value),
        lambda value: re.sub(r"([^\w\n])", r"\\\1", value),
        quote,
        quote_plus,
        lambda value: quote(value, safe=""),
        lambda value: re.sub("%[0-9A-F]{2}", lambda match: match[0].lower(), quote(value, safe=":@")),
    ],
)
def test_the_value_of_a_secret_is_replaced_however_it_is_escaped(value: str, escape: Callable[[str], str]) -> None:
    text = f"{{x={escape(value)}&y=1}}"
    shown = redact(text, {"KEY": value})
    assert re.fullmatch(r"\{x=(['\"\\]|''|'\\'')*\(secret KEY\)(['\"\\]|''|'\\'')*&y=1\}", shown)


def test_the_secret_of_a_byte_that_is_no_text_is_replaced() -> None:
    assert redact("x=%FFabc", {"KEY": "\udcffabc"}) == "x=(secret KEY)"


@given(st.text(alphabet=st.one_of(st.characters(), st.sampled_from("\x1b[]0;mP\\\x07\x9b\x9c\r\n")), max_size=40))
def test_whatever_the_text_nothing_harmful_is_left(text: str) -> None:
    assert not HARMFUL.search(printable(text))
    assert "\n" not in one_line(text)
    assert printable(printable(text)) == printable(text)
