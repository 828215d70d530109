"""What the documents say is true: commands parse, generated pages are current, links lead somewhere."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import wellhead
from wellhead.cli._app import build, shipped
from wellhead.cli._arguments import split, valued_options
from wellhead.cli._keys import KEYS
from wellhead.config import parse_override, resolve
from wellhead.errors import UsageError, all_errors

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("demo/*.md")])
CONSOLE = re.compile(r"^```console\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
GLOBAL = {"--json", "--quiet", "-q", "--help", "--version"}

# Put together here, so that this file does not hold them itself.
FORBIDDEN = [
    re.compile(re.escape(word)) for word in ("py" + "pi.org", "pythonhosted" + ".org", "/wo" + "rk/", "/tm" + "p/wh")
]


def commands(text: str) -> Iterator[str]:
    """The commands of the console blocks: lines that start with `$ wellhead`, with their continuation lines."""
    for block in CONSOLE.findall(text):
        for line in block.replace("\\\n", " ").splitlines():
            if line.startswith("$ wellhead"):
                yield line.removeprefix("$ ")


def what_is_wrong(command: str) -> list[str]:
    """Verbs, options and settings of a command that do not exist. Neither files nor values are looked at."""
    words = shlex.split(command, comments=True)[1:]
    for sign in ("|", ">", "2>", "&&", ";"):
        words = words[: words.index(sign)] if sign in words else words
    verbs = shipped()
    app = build(verbs)
    found = split(words, lambda verb: valued_options(app, verb) if verb in verbs else set())
    if found.verb is None:
        return [word for word in found.rest if word not in GLOBAL]
    if found.verb not in verbs:
        return [found.verb]
    options = {s for parameter in app.commands[found.verb].params for s in (*parameter.opts, *parameter.secondary_opts)}
    before_values, taken = [], False
    for word in found.rest:
        if not taken and word.startswith("-") and word != "-":
            before_values.append(word.partition("=")[0])
        taken = not taken and word in valued_options(app, found.verb)
    wrong = [option for option in before_values if option not in options | GLOBAL]
    schema = {name: {field: field for field in _fields(command)} for name, command in app.commands.items()}
    for text in found.overrides:
        try:
            resolve([parse_override(text)], schema)
        except UsageError as error:
            wrong.append(error.message)
    return wrong


def _fields(command: object) -> list[str]:
    names = []
    for parameter in command.params:  # type: ignore[attr-defined]
        names += [name.lstrip("-").replace("-", "_") for name in (parameter.name, *parameter.opts)]
    return names


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_on_a_page_exists(page: Path) -> None:
    assert {command: wrong for command in commands(page.read_text()) if (wrong := what_is_wrong(command))} == {}


def test_the_readme_shows_commands() -> None:
    assert len(list(commands((ROOT / "README.md").read_text()))) >= 2


@pytest.mark.parametrize(
    "command",
    ["wellhead extrat d", "wellhead status r --depe", "wellhead --jsn status r", "wellhead status r extract.shard=1"],
)
def test_a_wrong_command_is_seen(command: str) -> None:
    page = f"text\n```console\n$ {command} \\\n    --json | tail\noutput\n```\n"
    (found,) = commands(page)
    assert what_is_wrong(found)


def test_a_right_command_passes() -> None:
    assert what_is_wrong("wellhead --json status RUN extract.shard-seconds=2 | tail -1") == []


def test_generated_pages_are_current() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "generate_docs.py", "--check"], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_every_verb_documents_its_json() -> None:
    assert set(shipped()) <= set(KEYS)


def test_every_error_has_a_row() -> None:
    page = (ROOT / "docs" / "errors.md").read_text()
    assert [e.code for e in all_errors() if f"| {e.exit_code} | `{e.code}` |" not in page] == []


def dead_links(page: Path, text: str) -> list[str]:
    dead = []
    for target in LINK.findall(text):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name) if name else page
        if not file.exists() or (anchor and file.suffix == ".md" and anchor not in anchors(file.read_text())):
            dead.append(target)
    return dead


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as code hosts make them."""
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    assert dead_links(page, page.read_text()) == []


def test_a_dead_link_is_seen() -> None:
    page = ROOT / "README.md"
    assert dead_links(page, "[a](docs/none.md) [b](#no-such-heading) [c](docs/cli.md#wellhead-status)") == [
        "docs/none.md",
        "#no-such-heading",
    ]


def test_no_file_names_a_machine_or_a_registry() -> None:
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    texts = {name: (ROOT / name).read_bytes() for name in names.split("\0") if name and (ROOT / name).is_file()}
    assert len(texts) > 20
    found = {
        name: word.pattern
        for name, data in texts.items()
        for word in FORBIDDEN
        if word.search(data.decode("utf-8", errors="replace"))
    }
    assert found == {}


def test_a_forbidden_word_is_seen() -> None:
    assert any(word.search("see https://py" + "pi.org/simple") for word in FORBIDDEN)


def test_the_changelog_knows_this_version() -> None:
    headings = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings
    assert headings[0] == "Unreleased" or re.match(rf"\[?{re.escape(wellhead.__version__)}\b", headings[0])
