"""Turns of two trees: which came when, and the table."""

from benchmarks import old_and_new


def test_trees_take_turns_and_the_table_has_the_ratio(tmp_path, monkeypatch, capsys):
    """A tree that always comes second finds the kernels of the first compiled: the turns are old, new, new, old."""
    ran = []

    def run(tree, scenarios, repeats):
        ran.append("old" if tree == tmp_path else "new")
        assert (scenarios, repeats) == (["suite"], 5)
        return {"balanced, m": {"old": 2.0, "new": 1.5}[ran[-1]] + 0.1 * (len(ran) > 2)}

    monkeypatch.setattr(old_and_new, "run", run)
    monkeypatch.setattr("sys.argv", ["old_and_new", "--old", str(tmp_path)])
    old_and_new.main()
    assert ran == ["old", "new", "new", "old"]
    assert capsys.readouterr().out.splitlines()[-1] == "| balanced, m | 2.0000, 2.1000 | 1.5000, 1.6000 | 0.756 |"


def test_a_tree_runs_in_a_process_of_its_own(tmp_path):
    """The scenario, as the JSON of that tree's ``bench`` has it; a peer's result is none of ours."""
    package = tmp_path / "rosebatch"
    package.mkdir()
    package.joinpath("__init__.py").touch()
    package.joinpath("__main__.py").write_text(
        "import json, sys\n"
        "run = {'kind': 'run', 'scenario': sys.argv[3], 'model': 'm', 'seconds': [3.0, 1.0, 2.0]}\n"
        "print(json.dumps({'results': [run, {'kind': 'peer', 'scenario': 'other'}]}))\n"
    )
    assert old_and_new.run(tmp_path, ["balanced"], 3) == {"balanced, m": 2.0}
