import pytest

# Its assertions are those of the tests that inherit it.
pytest.register_assert_rewrite("tests.sandboxes.contract")
