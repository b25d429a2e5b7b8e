"""Prefect's pages in a browser: start a run by the form, be refused, read its page,
cancel and retry.
"""

from __future__ import annotations

import re
import urllib.error
import urllib.request
from contextlib import closing
from typing import Any

import pytest

from gristmill.flows.prefect.sign_in import sign_in_link
from tests.servers import wait_for


def test_the_form_explains_every_parameter_and_starts_the_run(
    site: Any, page: Any, finished: Any
) -> None:
    assert finished["state_type"] == "COMPLETED", finished["state"]["message"]
    assert finished["parameters"]["manifest"] == str(site.manifest)
    page.goto(
        f"{site.address}/deployments/deployment/{site.deployment('gristmill-stage')}/run"
    )
    page.get_by_text("The stage to run.").wait_for()
    page.get_by_text("Settings that replace the manifest's, one each").wait_for()
    schema = site.call(f"/deployments/{site.deployment('gristmill-stage')}")[
        "parameter_openapi_schema"
    ]["properties"]
    assert schema["stage"]["enum"][:3] == ["generate", "ingest", "clean"]
    assert ("default" in schema["stage"], schema["force"]["type"]) == (False, "boolean")


def test_a_manifest_in_the_folder_of_up_has_deployments_with_its_own_stages(
    site: Any, page: Any
) -> None:
    stages = ["ingest", "filter", "tokenizer", "tokenize", "mix", "pretrain"]
    deployment = site.call(f"/deployments/{site.deployment('gristmill', 'tiny')}")
    schema = deployment["parameter_openapi_schema"]
    assert deployment["parameters"] == {
        "manifest": str(site.manifest),
        "until": "pretrain",
    }
    assert (schema["properties"]["until"]["enum"], schema["required"]) == (
        stages,
        ["manifest", "until"],
    )
    stage_schema = site.call(
        f"/deployments/{site.deployment('gristmill-stage', 'tiny')}"
    )["parameter_openapi_schema"]
    assert (stage_schema["properties"]["stage"]["enum"], stage_schema["required"]) == (
        stages,
        ["manifest", "stage", "force"],
    )

    page.goto(
        f"{site.address}/deployments/deployment/{site.deployment('gristmill', 'tiny')}/run"
    )
    page.get_by_text("The last stage to run.").wait_for()
    labels = page.locator("label").all_inner_texts()
    optional = {
        label.partition("(")[0].strip() for label in labels if "(Optional)" in label
    }
    assert {"manifest", "until"} & optional == set()
    assert {"overrides", "store"} <= optional
    page.get_by_role("button", name="Submit").click()
    (run,) = wait_for(
        lambda: site.call(
            "/flow_runs/filter", {"deployments": {"id": {"any_": [deployment["id"]]}}}
        ),
        "the form's run",
    )
    assert site.ended(run["id"])["state_type"] == "COMPLETED"


def test_the_page_of_a_run_has_its_stages_log_lines_and_report(
    site: Any, page: Any, finished: Any
) -> None:
    page.goto(f"{site.address}/runs/flow-run/{finished['id']}")
    page.get_by_text(re.compile(r"ingest: Completed in")).first.wait_for()
    page.get_by_text("Artifacts", exact=True).last.click()
    page.get_by_text("gristmill-report").first.wait_for()
    tasks = site.call(
        "/task_runs/filter", {"flow_runs": {"id": {"any_": [finished["id"]]}}}
    )
    assert {task["name"]: task["state_name"] for task in tasks} == dict.fromkeys(
        ["ingest", "filter", "tokenizer", "tokenize", "mix", "pretrain"], "Completed"
    )
    artifacts = site.artifacts(finished["id"])
    description = artifacts["pretrain-progress"]["description"]
    assert re.search(r"pretrain: 16/16 steps, loss \d\.\d{3}", description)
    assert artifacts["pretrain-progress"]["data"] == 100.0
    card = artifacts["pretrain-card"]["data"]
    assert "![loss by step](data:image/svg+xml;base64," in card
    summary = artifacts["gristmill-run"]["data"]
    for part in (
        "## Documents",
        "## Why documents were dropped",
        "## Mixture",
        "## Training",
        "| filter |",
    ):
        assert part in summary
    page.goto(f"{site.address}/artifacts/artifact/{artifacts['gristmill-run']['id']}")
    link = page.get_by_role("link", name="Open the report").get_attribute("href")
    # The port stays the same when `up` restarts.
    assert link.startswith(
        f"http://127.0.0.1:{int(site.address.rpartition(':')[2]) + 1}/"
    )
    page.goto(link)
    assert page.title() == "tiny - gristmill"


def test_the_link_signs_in_and_shows_the_deployments(site: Any, browser: Any) -> None:
    with closing(browser.new_context()) as context:
        page = context.new_page()
        page.goto(sign_in_link(int(site.address.rpartition(":")[2]), site.password))
        page.get_by_text("stage-of-tiny").first.wait_for()
        assert page.url.startswith(f"{site.address}/v2/deployments")


def test_reports_are_the_only_files_that_are_served(site: Any, finished: Any) -> None:
    summary = site.artifacts(finished["id"])["gristmill-run"]["data"]
    link = re.search(r"\[Open the report\]\((http://127[^)]+)\)", summary)
    assert link is not None
    for url in (
        link[1].replace("report.html", "run.json"),
        link[1].rpartition("/")[0] + "/%2Fetc%2Fpasswd",
    ):
        with pytest.raises(urllib.error.HTTPError) as denied:
            urllib.request.urlopen(url, timeout=20)
        assert denied.value.code == 403
    with pytest.raises(urllib.error.HTTPError) as foreign_host:
        urllib.request.urlopen(
            urllib.request.Request(link[1], headers={"Host": "elsewhere.example"}),
            timeout=20,
        )
    assert foreign_host.value.code == 400


def test_wrong_values_are_refused_by_the_form_or_by_the_run_with_the_manifests_sentence(
    site: Any, page: Any
) -> None:
    create = f"/deployments/{site.deployment('gristmill')}/create_flow_run"
    for parameters in (
        {"until": "nonsense"},
        {"overrides": ["nonsense"]},
        {"manifest": ""},
    ):
        with pytest.raises(urllib.error.HTTPError) as denied:
            site.call(create, {"parameters": parameters})
        assert denied.value.code == 409
    run = site.call(
        create,
        {
            "parameters": {
                "manifest": str(site.manifest),
                "overrides": ["mix.tokens=-3", "pretrain.stepz=3"],
            }
        },
    )
    failed_run = site.ended(run["id"])
    assert failed_run["state_type"] == "FAILED"
    assert failed_run["name"] == "tiny: mix.tokens=-3, pretrain.stepz=3"
    lines = site.call("/logs/filter", {"logs": {"flow_run_id": {"any_": [run["id"]]}}})
    assert [line["message"] for line in lines if "Traceback" in line["message"]] == []
    for sentence in (
        "mix.tokens: input should be greater than 0 (got -3)",
        "unknown key, did you mean 'steps'?",
    ):
        assert sentence in failed_run["state"]["message"]
        assert sentence in site.artifacts(run["id"])["refused"]["data"]
    page.goto(f"{site.address}/runs/flow-run/{run['id']}")
    page.get_by_text("did you mean 'steps'?").first.wait_for()
