"""The seeds of rows that give none."""

from rosebatch.job.seeds import row_seed


def test_fixed_values():
    """Another value in another version or process would change everyone's samples."""
    assert row_seed(None, 0, None, [1, 2]) == 1775802789539051898
    assert row_seed(7, 5, "a", [1, 2]) == 5429185208674272503


def test_without_a_job_seed_the_place_decides():
    """The same line twice must be sampled twice."""
    seeds = {row_seed(None, index, row_id, ids) for index in range(5) for row_id in ("a", None) for ids in ([1], [2])}
    assert len(seeds) == 20


def test_with_a_job_seed_the_place_does_not_matter():
    """Only job seed, id and prompt count; the ids 1 and "1" differ."""
    assert len({row_seed(3, index, "a", [1, 2]) for index in range(5)}) == 1
    arguments = [(3, "a", [1, 2]), (4, "a", [1, 2]), (3, "b", [1, 2]), (3, "a", [1, 3]), (3, "1", [1]), (3, 1, [1])]
    assert len({row_seed(seed, 0, row_id, ids) for seed, row_id, ids in arguments}) == 6


def test_a_place_is_not_a_seed():
    """Row 3 without a seed must not sample like --seed 3."""
    assert row_seed(None, 3, None, [1]) != row_seed(3, 0, None, [1])


def test_seeds_fit_the_sampler():
    """The sampler takes unsigned 64-bit seeds."""
    assert all(0 <= row_seed(None, index, None, [1]) < 2**64 for index in range(100))
