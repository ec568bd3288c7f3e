"""Every example of the book's page about Python runs as it stands there, beside a `model.gguf`."""

import os
import re
import shutil
import subprocess
import sys

import pytest

PAGE = os.path.join(os.path.dirname(__file__), "../../../docs/python.md")


def examples():
    with open(PAGE, encoding="utf-8") as page:
        return re.findall(r"^```python\n(.*?)^```", page.read(), re.M | re.S)


def test_there_are_examples():
    assert len(examples()) >= 5


@pytest.mark.parametrize("example", examples(), ids=lambda example: example.strip().splitlines()[0][:40])
def test_an_example_runs(example, path, tmp_path):
    shutil.copy(path, tmp_path / "model.gguf")
    # The model has random weights, and no template of its own.
    environment = {**os.environ, "KILN_DEVICE": "cpu"}
    ran = subprocess.run([sys.executable, "-c", example], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip(), "an example shows something"
