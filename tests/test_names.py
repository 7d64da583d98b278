"""Names a stranger can guess: a class name exists once, functions are verbs, modules are small enough to read."""

from __future__ import annotations

import re
from collections import defaultdict

from places import REPOSITORY

SOURCE = REPOSITORY / "src" / "tessera"
MOST_PARTICIPLES = 20
MOST_LINES = 450
NOT_PARTICIPLES = {"need", "speed", "seed", "feed", "embed", "shed", "exceed", "proceed", "succeed"}
IRREGULAR = re.compile(
    "held|told|taken|made|given|kept|left|known|seen|found|said|written|drawn|laid|cut|sent|shown|spent|begun|gone|done|"
    "built|paid|met|lost|chosen|broken|hidden|frozen|grown|thrown|bound|fed|led|driven|heard|meant|brought|caught"
)


DEFINITION = re.compile(r"^[ ]*(?:async )?(class|def) (\w+)[(:\[]", re.MULTILINE)


def definitions(kind: str) -> list[tuple[str, str]]:
    """(file, name) of all classes ("class") or functions ("def"). By pattern: to parse all of it takes seconds."""
    return [
        (str(path.relative_to(SOURCE)), found[2])
        for path in sorted(SOURCE.rglob("*.py"))
        for found in DEFINITION.finditer(path.read_text())
        if found[1] == kind
    ]


def test_a_class_name_exists_once() -> None:
    places = defaultdict(list)
    for file, name in definitions("class"):
        places[name].append(file)
    assert len(places) > 500
    assert {name: files for name, files in places.items() if len(files) > 1} == {}


def is_participle(name: str) -> bool:
    word = name.strip("_")
    return bool(IRREGULAR.fullmatch(word)) or bool(re.fullmatch(r"[a-z]+ed", word) and word not in NOT_PARTICIPLES)


def test_functions_are_verbs_and_not_bare_participles() -> None:
    found = [f"{file} {name}" for file, name in definitions("def") if not name.startswith("__") and is_participle(name)]
    assert len(found) < MOST_PARTICIPLES, "\n".join(found)


def test_a_module_fits_in_a_head() -> None:
    long = {
        str(path.relative_to(SOURCE)): lines
        for path in SOURCE.rglob("*.py")
        if (lines := path.read_text().count("\n")) > MOST_LINES
    }
    assert long == {}


def test_no_test_is_repeated_until_it_passes() -> None:
    """An intermittent fault must be seen."""
    marked = [path for path in (REPOSITORY / "tests").rglob("*.py") if "mark.fla" + "ky" in path.read_text()]
    assert marked == []
