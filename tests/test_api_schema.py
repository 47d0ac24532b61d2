"""Calls that schemathesis makes up of the server's own schema, right ones and wrong ones."""

import shutil
import subprocess
import sys
from pathlib import Path

from tests.api_server import PATIENCE, ToyRunner, serve

CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
    "unsupported_method",
)
ST = shutil.which("st", path=str(Path(sys.executable).parent))


def test_made_up_calls_find_no_5xx_and_no_answer_that_the_schema_does_not_name(tmp_path):
    with serve(ToyRunner(), max_tokens=64) as toy:
        tasks = toy.tasks()
        command = [
            *(ST, "run", f"{toy.url}/openapi.json", "--mode", "all", "--checks", ",".join(CHECKS)),
            *("--phases", "examples,coverage,fuzzing", "--seed", "1", "--max-examples", "20"),
            *("--request-timeout", str(PATIENCE), "--continue-on-failure", "--no-color"),
        ]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr
        assert toy.metric("vllm:request_success_total") > 20, "hardly a call was served"
        toy.check_nothing_is_left(tasks)
