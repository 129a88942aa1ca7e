"""What the check of a task says of it."""

from __future__ import annotations

from kuberoll_workers.harbor.checking import Checked, Played


def test_a_solution_that_fails_is_named_if_it_is_worth_nothing() -> None:
    failed = Played(reward=0.0, remark="the solution ended with exit code 3")
    nothing = Played(reward=0.0)
    problem = Checked(task="one", solution=failed, nothing=nothing).problem
    assert problem == "the solution is worth no more than doing nothing: the solution ended with exit code 3"
    worth = Played(reward=1.0, remark="the solution ended with exit code 3")
    assert Checked(task="one", solution=worth, nothing=nothing).problem is None
