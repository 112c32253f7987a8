"""The field ``prediction`` of a chat: the answer of a row that has it comes in fewer steps, and is the same."""

import json

from tests.helpers.json_lines import write_lines


def test_a_predicted_answer_is_the_same_in_fewer_steps(cli, model_folder, tmp_path):
    """It was ignored."""
    steps, texts, accepted = [], [], []
    prediction = {}
    for _ in range(2):
        body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 24, "seed": 1, **prediction}
        body["structured_outputs"] = {"regex": "[a-z]{24}"}
        source = write_lines(tmp_path / "in.jsonl", [{"custom_id": "a", "url": "/v1/chat/completions", "body": body}])
        flags = ("--model", model_folder, "--dtype", "float32", "--report", tmp_path / "r.json")
        assert cli("generate", source, "-o", tmp_path / "out.jsonl", *flags).code == 0
        (answer,) = map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())
        texts.append(answer["response"]["body"]["choices"][0]["message"]["content"])
        report = json.loads((tmp_path / "r.json").read_text())
        steps.append(report["steps"])
        accepted.append(report["accepted_tokens"])
        prediction = {"prediction": {"type": "content", "content": texts[0]}}
    assert texts[0] == texts[1]
    assert steps[1] < steps[0] and accepted[1] > accepted[0]
