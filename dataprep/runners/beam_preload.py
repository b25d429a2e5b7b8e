"""Preloads Beam's local runner. Imported by processes that are forked."""

import importlib

from gristmill.dataprep.runners.runner import import_beam

import_beam()
importlib.import_module("apache_beam.runners.portability.fn_api_runner")
