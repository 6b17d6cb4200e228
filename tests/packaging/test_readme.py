"""What the documents show must run."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])


def snippets(document: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", document.read_text(), re.MULTILINE | re.DOTALL)


def test_the_readme_snippet_runs_as_written(tmp_path):
    [snippet] = snippets(ROOT / "README.md")
    done = subprocess.run([sys.executable, "-c", snippet], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    first, second, steps = done.stdout.splitlines()
    assert re.fullmatch(r"\[3, 1, 4, 1, 5\] -> \[(\d+, ){7}\d+\]", first)
    assert re.fullmatch(r"\[9, 2, 6\] -> \[(\d+, ){7}\d+\]", second)
    assert steps == "{'mega': 8, 'fused': 0, 'standard': 0}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_snippets_are_python(document):
    for snippet in snippets(document):
        ast.parse(snippet)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document):
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", document.read_text()):
        assert target.startswith("https://") or (document.parent / target).exists(), target


@pytest.mark.parametrize("command", ["demo", "test"])
def test_the_two_commands_are_targets_of_the_makefile(command):
    assert f"    make {command}\n" in (ROOT / "README.md").read_text()
    assert re.search(rf"^{command}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
