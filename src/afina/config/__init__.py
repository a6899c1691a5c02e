"""Settings, and how YAML, flags and defaults become them with the origin of every value."""

from afina.config.settings import EvalSettings, GenerateSettings, Settings, TrainSettings

__all__ = ["EvalSettings", "GenerateSettings", "Settings", "TrainSettings"]
