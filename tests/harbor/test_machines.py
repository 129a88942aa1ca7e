"""The sandbox that a row asks for: what it says itself comes before what its job says."""

from __future__ import annotations

from kuberoll_api.model.sandboxes import Sandbox
from kuberoll_workers.harbor.machines import Reach, spec_of

NOTHING = Reach("None")


def test_a_row_s_own_directory_and_time_come_first() -> None:
    job = Sandbox.model_validate({"user": "agent:users", "workdir": "/job", "startSeconds": 30})
    own = spec_of({"image": "a", "workdir": "/own", "start_timeout": 90}, job, {}, network=NOTHING)
    assert (own.user, own.workdir, own.start_seconds) == ("agent:users", "/own", 90.0)
    other = spec_of({"image": "a"}, job, {}, network=NOTHING)
    assert (other.user, other.workdir, other.start_seconds) == ("agent:users", "/job", 30.0)


def test_where_neither_says_something_the_image_does() -> None:
    found = spec_of({"image": "a"}, Sandbox(), {}, network=NOTHING)
    assert (found.user, found.workdir, found.start_seconds) == ("", "", 600.0)
