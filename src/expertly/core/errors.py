"""Every error that a user can cause. The CLI prints them as one line and exits 2; it catches nothing else."""


class ExpertlyError(Exception):
    """Base of the errors that expertly raises on purpose; the message is complete for a user."""


class ConfigError(ExpertlyError):
    """A setting (flag, argument, environment) is unknown, malformed or cannot work."""


class CheckpointError(ExpertlyError):
    """The source checkpoint lacks something, contradicts itself or is not one that expertly can run."""


class UnsupportedModelError(CheckpointError):
    """A well-formed checkpoint of a family, quantisation or shape that expertly does not run."""


class DownloadError(CheckpointError):
    """The hub cannot be reached, or does not give what it should; trying again may help."""


class StoreError(ExpertlyError):
    """A packed store is unreadable, damaged, half-written or belongs to another checkpoint."""


class BudgetError(ConfigError):
    """The memory budget cannot work; the message says the least that does."""


class TraceError(ExpertlyError):
    """A trace is damaged, of another version, or lacks a field that is needed."""


class GeometryError(ConfigError, ValueError):
    """A layer's experts cannot have this shape. A ValueError, so that pydantic says in which layer of a file."""


class TransferError(ExpertlyError):
    """Moving expert bytes failed (a read error, a failed copy). The batch it served has failed."""


class NanError(ExpertlyError):
    """A forward pass gave NaN: weights hold it, or numbers grew beyond the dtype. The message names the first such
    layer.
    """


NAN_REASONS = "the checkpoint's weights hold NaN, or numbers grow beyond what its dtype holds (try dtype=float32)"


class EngineClosedError(ExpertlyError):
    """The model was unloaded, or broken beyond repair; load it again."""


class ModelUseError(ExpertlyError):
    """A loaded model was asked for something that is impossible for a model whose experts are elsewhere."""
