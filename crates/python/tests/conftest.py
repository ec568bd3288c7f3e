"""The model of the tests: a tiny one with random weights, whose path is in KILN_TEST_MODEL (`scripts/release/python` makes it)."""

import os

import pytest

from kiln import Llama


@pytest.fixture(scope="session")
def path():
    found = os.environ.get("KILN_TEST_MODEL")
    assert found, "KILN_TEST_MODEL names no model; scripts/release/python runs these tests"
    return found


@pytest.fixture(scope="session")
def llm(path):
    """Four sequences at once, on the CPU."""
    with Llama(path, n_ctx=512, n_parallel=4, n_gpu_layers=0, chat_format="chatml", seed=1) as llm:
        yield llm
