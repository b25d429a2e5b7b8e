"""A Dataflow job up to its submission: description and uploads from Beam's own runner,
without Google.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.engines.clusters import find_engine
from gristmill.dataprep.runners.errors import MissingEngineError

DRY_RUN = """
import json, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from apache_beam.options.pipeline_options import GoogleCloudOptions
from apache_beam.runners.dataflow.internal.apiclient import DataflowApplicationClient

uploads = {}
GoogleCloudOptions._warn_if_soft_delete_policy_enabled = lambda self, name: None  # asks Google about a bucket
GoogleCloudOptions._create_default_gcs_bucket = lambda self: None  # asks it for one, for two minutes
DataflowApplicationClient.stage_file = lambda self, place, name, stream, *rest, **named: uploads.update({
    name: (place, stream.read().decode("latin1"))})

from gristmill.core.stage_context import Context
from gristmill.mixtures.schema.engine import BeamEngine
from gristmill.dataprep.runners.runner import run_there

def work(group):
    return ()

context = Context(Path(sys.argv[3]).parent, "stage", BeamEngine(runner="dataflow", options=json.loads(sys.argv[2])))
run_there("job", context, work, [[("a", {"n": 1})], [("b", {})]])
json.dump(uploads, open(sys.argv[3], "w"))
"""
OPTIONS = {
    "project": "a-project",
    "region": "europe-west1",
    "temp_location": "gs://bucket/temp",
    "no_auth": True,
    "sdk_container_image": "registry.example/gristmill:1",
    "template_location": "gs://bucket/job.json",
}


def dry_run(folder: Path, **options: object) -> subprocess.CompletedProcess[str]:
    try:
        packages = find_engine("dataflow-*")
    except MissingEngineError as error:
        pytest.skip(str(error))
    options_json = json.dumps({**OPTIONS, **options})
    return subprocess.run(
        [
            sys.executable,
            "-c",
            DRY_RUN,
            str(packages),
            options_json,
            str(folder / "uploads.json"),
        ],
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
def test_job_description_names_the_worker_image(tmp_path: Path) -> None:
    completed = dry_run(tmp_path)
    assert completed.returncode == 0, completed.stderr
    uploads = json.loads((tmp_path / "uploads.json").read_text())
    place, text = uploads["job.json"]
    job = json.loads(text)
    assert (place, job["type"]) == ("gs://bucket", "JOB_TYPE_BATCH")
    assert "use_runner_v2" in json.dumps(job["environment"]["experiments"])
    place, graph = uploads["pipeline.pb"]
    assert place.startswith("gs://bucket/temp")
    assert "registry.example/gristmill:1" in graph
    assert "beam:transform:pardo:v1" in graph


@pytest.mark.slow
def test_temp_location_outside_a_bucket_is_rejected(tmp_path: Path) -> None:
    completed = dry_run(tmp_path, temp_location="/tmp/there")
    assert completed.returncode != 0
    assert "temp_location" in completed.stderr
