"""Settings, and how YAML, flags and defaults become them with the origin of every value."""

from afina.config.dump import dump
from afina.config.load import Resolved, RunConfig, as_given, load_config
from afina.config.schema import schema
from afina.config.settings import (
    EvalSettings,
    GenerateSettings,
    ParallelSettings,
    Settings,
    TrainSettings,
)
from afina.problems import build, of_kind

__all__ = [
    "EvalSettings",
    "GenerateSettings",
    "ParallelSettings",
    "Resolved",
    "RunConfig",
    "Settings",
    "TrainSettings",
    "as_given",
    "build",
    "dump",
    "load_config",
    "of_kind",
    "schema",
]
