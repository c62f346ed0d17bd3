"""EleutherAI's lm-eval (`local-completions`) scores a task over the API as transformers does in memory.

Its task and data are written here; it is an extra of its own: `pip install 'pagefold[lm-eval]'`.
"""

import json
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch

from tests.model_dir import write_model_dir
from tests.server.live import live

CHOICES = ["sky", "boat", "fold", "page"]
DOCS = [
    {"question": f"{a} {b}:", "choices": CHOICES, "answer": i % 4} for i, (a, b) in enumerate(zip("abcdef", "ghijkl"))
]
SCORED = """
task: scored
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{file}"}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
metric_list: [{{metric: acc}}]
"""
GENERATED = """
task: generated
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{file}"}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{choices[answer]}}}}"
generation_kwargs: {{until: ["k"], max_gen_toks: 12, do_sample: false, temperature: 0}}
metric_list: [{{metric: exact_match}}]
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """(lm-eval's results, {task: its samples}, folder of the model)."""
    if find_spec("lm_eval") is None:
        pytest.skip("lm-eval is not installed; it is the extra 'lm-eval' of this package")
    folder = tmp_path_factory.mktemp("lm_eval")
    model, data = write_model_dir(folder / "tiny"), folder / "docs.jsonl"
    data.write_text("".join(json.dumps(doc) + "\n" for doc in DOCS))
    for name, text in (("scored", SCORED), ("generated", GENERATED)):
        (folder / f"{name}.yaml").write_text(text.format(file=data))
    with live(folder, served_model_name="tiny") as server:
        arguments = f"model=tiny,base_url={server.url}/v1/completions,tokenizer={model},num_concurrent=2,max_length=255"
        command = [sys.executable, "-m", "lm_eval", "--model", "local-completions", "--model_args", arguments]
        command += ["--tasks", "scored,generated", "--include_path", str(folder), "--output_path", str(folder / "out")]
        offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "hub"), "TOKENIZERS_PARALLELISM": "false"}
        command += ["--log_samples"]
        how = {"env": os.environ | offline, "capture_output": True, "text": True, "timeout": 300}
        done = subprocess.run(command, check=False, **how)
    assert done.returncode == 0, done.stderr[-3000:]
    print(done.stdout)
    samples = {}
    for task in ("scored", "generated"):
        (file,) = (folder / "out").rglob(f"samples_{task}_*.jsonl")
        samples[task] = sorted(map(json.loads, file.read_text().splitlines()), key=lambda sample: sample["doc_id"])
    (file,) = (folder / "out").rglob("results_*.json")
    return json.loads(file.read_text())["results"], samples, model


@pytest.fixture(scope="module")
def model(run):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(run[2], dtype=torch.float32)


def log_likelihood(model, context: bytes, ending: bytes) -> float:
    """Of `ending` behind `context`; a byte is a token, and lm-eval puts no BOS in front."""
    from tests.engine.tiny import tiny_tokenizer

    encode = tiny_tokenizer().encode_plain
    ids = torch.tensor([[*encode(context.decode()), *encode(ending.decode())]])
    logprobs = model(ids).logits[0].log_softmax(-1)
    return sum(logprobs[at - 1, ids[0, at]].item() for at in range(ids.shape[1] - len(ending), ids.shape[1]))


@pytest.mark.slow
def test_likelihoods_and_accuracy_are_those_of_transformers(run, model):
    results, samples, _ = run
    right = 0
    for doc, sample in zip(DOCS, samples["scored"], strict=True):
        expected = [log_likelihood(model, doc["question"].encode(), f" {c}".encode()) for c in CHOICES]
        got = [float(response[0][0]) for response in sample["resps"]]
        assert got == pytest.approx(expected, abs=1e-3)
        right += max(range(4), key=expected.__getitem__) == doc["answer"]
    assert results["scored"]["acc,none"] == pytest.approx(right / len(DOCS))


@pytest.mark.slow
def test_generation_stops_where_the_task_says(run):
    _, samples, _ = run
    assert len(samples["generated"]) == len(DOCS)
    for sample in samples["generated"]:
        assert "k" not in sample["resps"][0][0]
