"""Encoded texts of these tests go to a folder of their own, not to the user's cache."""

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SKETCHOPTIM_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield
