"""`gristmill bench results`: fits of a sweep against RegMix's LightGBM, on the runs that
RegMix published (sail-sg/regmix, `data/`).

Both sides learn the loss of each domain from mixtures of models of 1M parameters, and
rank the 256 mixtures that models of 60M were trained on. The peer has the settings of
the authors' notebook (`regression_fitting/regression.ipynb`): 1,000 trees at a rate of
0.01, stopped early on mixtures that are not among the first ones, here the 256 of 1M
that were published as a test; ours sees the first ones alone.
"""

from __future__ import annotations

import csv
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from benchmarks.checkout import data_folder
from benchmarks.measuring import Row, row
from gristmill.flows.sweeps.results import fit

RUNS = "mixtures_regmix"
PROXIES = (32, 64, 128, 512)
STOPPING_ROUNDS = 3


def rows() -> Iterator[Row]:
    """Measure rank correlation, and the share of pairs in the right order, as means
    over the domains.
    """
    folder = data_folder() / RUNS
    if not folder.exists():
        yield row("sweep_law_vs_regmix", None, None, "rank", "no runs of RegMix here")
        return
    for number in PROXIES:
        ours, peer = np.mean(
            [scores(folder, domain, number) for domain in domains(folder)], axis=0
        )
        note = "mean over 13 domains; 256 mixtures of 60M models"
        title = f"sweep_law_vs_regmix, {number} proxies"
        yield row(f"{title}: rank", ours[0], peer[0], "Spearman's rho", note)
        yield row(f"{title}: pairs", ours[1], peer[1], "of pairs decided", note)


def scores(folder: Path, domain: int, number: int) -> np.ndarray:
    """Scores of ours and of the peer on the 60M models: (2, rank and pairs)."""
    from lightgbm import LGBMRegressor, early_stopping

    shares, losses = read_runs(folder, "train", "1m")
    stop_shares, stop_losses = read_runs(folder, "test", "1m")
    test_shares, test_losses = read_runs(folder, "test", "60m")
    shares, values, truth = (
        shares[:number],
        losses[:number, domain],
        test_losses[:, domain],
    )
    trees = LGBMRegressor(
        objective="regression",
        n_estimators=1000,
        learning_rate=0.01,
        random_state=42,
        verbosity=-1,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trees.fit(
            shares,
            values,
            eval_set=[(stop_shares, stop_losses[:, domain])],
            eval_metric="l2",
            callbacks=[early_stopping(STOPPING_ROUNDS, verbose=False)],
        )
        predictions = (
            fit(shares, values).predict(test_shares),
            np.asarray(trees.predict(test_shares)),
        )
    return np.array([rank_scores(predicted, truth) for predicted in predictions])


def rank_scores(predicted: np.ndarray, truth: np.ndarray) -> tuple[float, float]:
    """Spearman's rank correlation, and the share of pairs in the right order; of equal
    predictions half of the pairs are right.
    """
    from scipy.stats import spearmanr

    first, second = np.triu_indices(len(truth), 1)
    agreement = np.sign(predicted[first] - predicted[second]) * np.sign(
        truth[first] - truth[second]
    )
    is_constant = np.ptp(predicted) == 0
    rank = 0.0 if is_constant else float(spearmanr(predicted, truth).statistic)
    return rank, float((1 + agreement.mean()) / 2)


def read_runs(folder: Path, split: str, size: str) -> tuple[np.ndarray, np.ndarray]:
    """Shares of 17 sources, which sum to 1, and losses on 13 domains, a row per run."""
    shares, losses = (
        np.loadtxt(
            folder / f"{split}_{table}_{size}.csv", delimiter=",", skiprows=1, ndmin=2
        )[:, 1:]
        for table in ("mixture", "pile_loss")
    )
    return shares / shares.sum(axis=1, keepdims=True), losses


def domains(folder: Path) -> range:
    """Columns of the losses."""
    with open(folder / "train_pile_loss_1m.csv") as table:
        return range(len(next(csv.reader(table))) - 1)
