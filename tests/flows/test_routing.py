"""A stage run by another deployment: it gets the same parameters, our run waits for it,
and ending ours ends it.
"""

from __future__ import annotations

import uuid
from types import SimpleNamespace
from typing import Any

import pytest

from gristmill.flows.prefect import remote_stages
from gristmill.flows.prefect.remote_stages import run_elsewhere
from gristmill.flows.running.run import StageFailedError

SESSION: Any = SimpleNamespace(
    manifest_file="a.yaml", overrides=["pretrain.steps=5"], store_option=None
)


class Server:
    """A fake server that returns the other run's states in order; a state that is an
    exception is raised.
    """

    def __init__(self, *states: Any) -> None:
        self.states = list(states)
        self.started: dict[str, Any] = {}
        self.set_to: list[str] = []

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        return

    def run_deployment(
        self, name: str, parameters: dict[str, Any], timeout: float
    ) -> Any:
        assert timeout == 0, "this process waits itself, so that it can be interrupted"
        self.started = {"deployment": name, **parameters}
        return SimpleNamespace(id=uuid.uuid4(), name="lucky-owl")

    def read_flow_run(self, run: uuid.UUID) -> Any:
        state = self.states.pop(0)
        if isinstance(state, BaseException):
            raise state
        return SimpleNamespace(state=state)

    def set_flow_run_state(self, run: uuid.UUID, state: Any) -> None:
        self.set_to.append(state.name)


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Any:
    def make(*states: Any) -> Server:
        server = Server(*states)
        monkeypatch.setattr(
            "prefect.client.orchestration.get_client", lambda sync_client: server
        )
        monkeypatch.setattr("prefect.deployments.run_deployment", server.run_deployment)
        monkeypatch.setattr(remote_stages, "POLL_SECONDS", 0.0)
        return server

    return make


def test_remote_run_gets_our_parameters_and_is_awaited(serve: Any) -> None:
    from prefect.states import Completed, Pending, Running

    server = serve(Pending(), Running(), Completed())
    run_elsewhere(SESSION, "pretrain", "gristmill-stage/gpu", force=True)
    assert server.started == {
        "deployment": "gristmill-stage/gpu",
        "manifest": "a.yaml",
        "stage": "pretrain",
        "force": True,
        "overrides": ["pretrain.steps=5"],
        "store": "",
    }
    assert (server.states, server.set_to) == ([], [])


@pytest.mark.parametrize("state", ["Failed", "Crashed", "Cancelled"])
def test_failed_remote_run_fails_the_stage_with_its_message(
    state: str, serve: Any
) -> None:
    from prefect import states

    serve(states.Running(), getattr(states, state)(message="no memory"))
    with pytest.raises(
        StageFailedError,
        match=f"pretrain: the run lucky-owl of gristmill-stage/gpu ended as {state}: "
        "no memory",
    ):
        run_elsewhere(SESSION, "pretrain", "gristmill-stage/gpu", force=False)


def test_interrupted_run_cancels_its_remote_run(serve: Any) -> None:
    from prefect.states import Running

    server = serve(Running(), KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        run_elsewhere(SESSION, "pretrain", "gristmill-stage/gpu", force=False)
    assert server.set_to == ["Cancelling"]


def test_missing_deployment_error_names_the_command_to_register_it(
    serve: Any, monkeypatch: Any
) -> None:
    from prefect.exceptions import ObjectNotFound

    serve()

    def absent(*_: Any, **__: Any) -> Any:
        raise ObjectNotFound(http_exc=RuntimeError("404"))

    monkeypatch.setattr("prefect.deployments.run_deployment", absent)
    with pytest.raises(
        StageFailedError,
        match="no deployment gristmill-stage/gpu; register it with: prefect deploy",
    ):
        run_elsewhere(SESSION, "pretrain", "gristmill-stage/gpu", force=False)
