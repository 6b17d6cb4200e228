"""Help is for people who are waiting: nothing heavy may be imported for it."""

import subprocess
import sys

import pytest

PROBE = """
import sys
from rocmega.cli import main
try:
    main({arguments!r})
except SystemExit as end:
    assert end.code == 0, end.code
heavy = {{"fastapi", "uvicorn", "torch", "numpy", "safetensors", "transformers", "tokenizers"}} & set(sys.modules)
assert not heavy, heavy
"""
COMMANDS = ("demo", "decode", "compare", "pack", "serve", "advise", "tune", "build", "doctor", "inspect")


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], *([command, "--help"] for command in COMMANDS)])
def test_help_imports_nothing_heavy(arguments):
    code = PROBE.format(arguments=arguments)
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    assert result.stdout


def test_help_names_every_command():
    result = subprocess.run([sys.executable, "-m", "rocmega", "--help"], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0
    assert all(command in result.stdout for command in COMMANDS)


def test_the_package_itself_imports_nothing_heavy():
    code = "import sys, rocmega; assert not {'torch', 'numpy', 'rich', 'typer'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
