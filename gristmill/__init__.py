"""gristmill grinds raw text into a trained language model. This is its Python
interface.

    import gristmill
    run = gristmill.run("recipe.yaml", until="filter")

Names are imported when they are first used, so that `import gristmill` costs nothing.
`__all__` is what docs/api.md describes; every other name and module is private and may
change without notice.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import gristmill.losses as losses
    import gristmill.training as training
    from gristmill.core.store import StoreLocationError
    from gristmill.dataprep.corpus import UnknownColumnError
    from gristmill.dataprep.whatif_thresholds import NotReplayableError, Tally
    from gristmill.dataprep.where_sql import ExpressionError
    from gristmill.flows.python.document_frames import Documents
    from gristmill.flows.python.finished_run import Report, Run, StageOutput, Store
    from gristmill.flows.python.manifest_builder import Manifest
    from gristmill.flows.python.run_api import ablate, plan, run
    from gristmill.flows.questions.compare import UnknownRunError
    from gristmill.flows.questions.explain import (
        Edit,
        Edits,
        Explanation,
        Judgement,
        MixtureUse,
        TextPiece,
    )
    from gristmill.flows.questions.find_documents import (
        DocumentNotFoundError,
        NothingIngestedError,
    )
    from gristmill.flows.questions.search import (
        MeaningRank,
        SearchError,
        SearchHit,
        SearchHits,
        WordsRank,
    )
    from gristmill.flows.questions.status import DocumentCounts, StageState
    from gristmill.flows.questions.threshold_samples import CutSample
    from gristmill.flows.questions.trace_tables import (
        CheckpointStep,
        DocumentTrace,
        RowDocument,
        StepReads,
        StepTrace,
        StepUse,
        TextPlace,
        TextSpan,
        TextTrace,
        TracedDocument,
    )
    from gristmill.flows.questions.training_reads import TraceError
    from gristmill.flows.questions.what_changed import PlannedStage, UsableCheckpoint
    from gristmill.flows.questions.whatif import (
        ChangedCut,
        Neighbour,
        RuleTallies,
        Size,
        Threshold,
        WhatIf,
    )
    from gristmill.flows.running.missing_libraries import MissingLibraryError
    from gristmill.flows.running.output_identities import NothingToKeepError
    from gristmill.flows.running.run import StageFailedError
    from gristmill.flows.stages.plan import UnknownStageError
    from gristmill.flows.sweeps.ablation import Trial
    from gristmill.flows.sweeps.ablation_results import (
        AblationResults,
        ComparedArm,
        ComparedTrial,
        Control,
    )
    from gristmill.flows.sweeps.paired_differences import Difference
    from gristmill.mixtures.loader import ManifestError, Problem
    from gristmill.tokenize.packed_files import PackedSetError
    from gristmill.train.data.row_stream import RowStream, StreamError, stream
    from gristmill.train.resuming import OtherRowsError

__version__ = "0.1.0"
"""The version of the distribution, which is built from this line."""

__all__ = [
    "AblationResults",
    "ChangedCut",
    "CheckpointStep",
    "ComparedArm",
    "ComparedTrial",
    "Control",
    "CutSample",
    "Difference",
    "DocumentCounts",
    "DocumentNotFoundError",
    "DocumentTrace",
    "Documents",
    "Edit",
    "Edits",
    "Explanation",
    "ExpressionError",
    "Judgement",
    "Manifest",
    "ManifestError",
    "MeaningRank",
    "MissingLibraryError",
    "MixtureUse",
    "Neighbour",
    "NotReplayableError",
    "NothingIngestedError",
    "NothingToKeepError",
    "OtherRowsError",
    "PackedSetError",
    "PlannedStage",
    "Problem",
    "Report",
    "RowDocument",
    "RowStream",
    "RuleTallies",
    "Run",
    "SearchError",
    "SearchHit",
    "SearchHits",
    "Size",
    "StageFailedError",
    "StageOutput",
    "StageState",
    "StepReads",
    "StepTrace",
    "StepUse",
    "Store",
    "StoreLocationError",
    "StreamError",
    "Tally",
    "TextPiece",
    "TextPlace",
    "TextSpan",
    "TextTrace",
    "Threshold",
    "TraceError",
    "TracedDocument",
    "Trial",
    "UnknownColumnError",
    "UnknownRunError",
    "UnknownStageError",
    "UsableCheckpoint",
    "WhatIf",
    "WordsRank",
    "__version__",
    "ablate",
    "losses",
    "plan",
    "run",
    "stream",
    "training",
]
_MODULES = {
    "dataprep.corpus": "UnknownColumnError",
    "dataprep.where_sql": "ExpressionError",
    "dataprep.whatif_thresholds": "NotReplayableError Tally",
    "flows.python.document_frames": "Documents",
    "flows.python.finished_run": "Report Run StageOutput Store",
    "flows.python.manifest_builder": "Manifest",
    "flows.python.run_api": "ablate plan run",
    "flows.questions.compare": "UnknownRunError",
    "flows.questions.explain": "Edit Edits Explanation Judgement MixtureUse TextPiece",
    "flows.questions.find_documents": "DocumentNotFoundError NothingIngestedError",
    "flows.questions.search": "MeaningRank SearchError SearchHit SearchHits WordsRank",
    "flows.questions.status": "DocumentCounts StageState",
    "flows.questions.threshold_samples": "CutSample",
    "flows.questions.trace_tables": "CheckpointStep DocumentTrace RowDocument "
    "StepReads "
    "StepTrace StepUse TextPlace TextSpan TextTrace TracedDocument",
    "flows.questions.training_reads": "TraceError",
    "flows.questions.what_changed": "PlannedStage UsableCheckpoint",
    "flows.questions.whatif": "ChangedCut Neighbour RuleTallies Size Threshold WhatIf",
    "flows.running.missing_libraries": "MissingLibraryError",
    "flows.running.run": "StageFailedError",
    "flows.stages.plan": "UnknownStageError",
    "flows.sweeps.ablation": "Trial",
    "flows.sweeps.ablation_results": "AblationResults ComparedArm ComparedTrial "
    "Control",
    "flows.sweeps.paired_differences": "Difference",
    "flows.running.output_identities": "NothingToKeepError",
    "core.store": "StoreLocationError",
    "mixtures.loader": "ManifestError Problem",
    "tokenize.packed_files": "PackedSetError",
    "train.data.row_stream": "RowStream StreamError stream",
    "train.resuming": "OtherRowsError",
}
"""Module of each public name; the imports above say the same to type
checkers.
"""
_PLACES = {
    name: f"{__name__}.{module}"
    for module, names in _MODULES.items()
    for name in names.split()
}
_GROUPS = ("losses", "training")
"""Modules of this package that offer names which belong together; what those have in
`__all__` is public too.
"""

if not (Path(__file__).parent / "flows").is_dir():
    # A checkout: the sub-packages are the folders beside this one. An installed package
    # has them inside.
    __path__.append(str(Path(__file__).parent.parent))


def __getattr__(name: str) -> Any:
    if name in _GROUPS:
        return import_module(f"{__name__}.{name}")
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_PLACES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
